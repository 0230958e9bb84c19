"""Gemma 4 in all sizes but 12B: E2B, E4B, 26B-A4B, 31B (Google's model cards).

This is the text decoder; the encoders are in `vision/gemma4.py` and `audio/gemma4.py`. Its
particulars: sliding and full layers have their own head sizes and RoPE; full layers may use one
projection for keys and values; late layers read an earlier layer's keys and values; each layer has
its own embedding of each token; experts run beside the dense block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from functools import partial
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import LayerSpec, SharedKV
from quire.device.activations import Gating
from quire.device.collectives import gathered, summed
from quire.device.device import current_device
from quire.device.weights import HeadPart
from quire.models.audio.gemma4 import (
    AudioTower,
    Gemma4AudioArguments,
    Gemma4AudioEncoder,
    channels_last,
)
from quire.models.base import ForwardContext, MediaEncoder, Module
from quire.models.families.gemma4_arguments import Gemma4Arguments
from quire.models.layers.clipped import CLIP_BOUNDS, Projector
from quire.models.layers.common import GATES, GatedMLP, embed, project_logits
from quire.models.layers.feed_forward import width_cuts
from quire.models.layers.linear import matrix_of
from quire.models.layers.moe import Experts, expert_cuts, stack_experts
from quire.models.layers.norm import RMSNorm
from quire.models.layers.rope import Rope, Rotate
from quire.models.layers.routers import SoftmaxRouter
from quire.models.settings import FULL, SLIDING
from quire.models.shares import Cut, Cuts, Split, head_rows, inputs, rows, within
from quire.models.stages import LayeredDecoder, LayeredModel
from quire.models.vision.gemma4 import Gemma4VisionArguments, Gemma4VisionEncoder, VisionTower

# Encoders and projectors of the multimodal checkpoint.
_VISION = ("vision_tower.", "embed_vision.")
_AUDIO = ("audio_tower.", "embed_audio.")


class Attention(Module):
    """Attention with queries, keys and values normalised per head, so the logits need no scale.

    Args:
        layer: index into `args.layer_types`.
        before: number of layers before these in the layout, which are another model's.
    """

    same_rows = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, args: Gemma4Arguments, layer: int, before: int = 0) -> None:
        super().__init__()
        full = args.layer_types[layer] == FULL
        bias, self._eps, self._layer = args.attention_bias, args.rms_norm_eps, before + layer
        self._heads = args.num_attention_heads
        self._kv_heads = args.num_global_key_value_heads if full else args.num_key_value_heads
        self._head_dim = args.global_head_dim if full else args.head_dim
        self._writes = layer < args.first_shared
        self._one_projection = args.attention_k_eq_v and full
        self.q_proj = nn.Linear(args.hidden_size, self._heads * self._head_dim, bias=bias)
        self.q_norm = RMSNorm(self._head_dim, eps=self._eps)
        if self._writes:
            width = self._kv_heads * self._head_dim
            self.k_proj = nn.Linear(args.hidden_size, width, bias=bias)
            self.k_norm = RMSNorm(self._head_dim, eps=self._eps)
            if not self._one_projection:
                self.v_proj = nn.Linear(args.hidden_size, width, bias=bias)
        self._parts: tuple[HeadPart, ...] = ()
        """Queries, keys and values, once they have been asked for."""
        self.o_proj = nn.Linear(self._heads * self._head_dim, args.hidden_size, bias=bias)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotate) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        if not self._parts:
            self._parts = self._described()
        q, *written = current_device().operations.heads(x, self._parts, self._eps, rotate=rotate)
        k, v = written if written else (None, None)
        out = step.attend(self._layer, q, k, v, scale=1.0)  # [T, heads, head_dim]
        y: mx.array = self.o_proj(out.reshape(len(x), -1))
        return y

    def _described(self) -> tuple[HeadPart, ...]:
        normed = partial(HeadPart, normed=True)
        q = normed(matrix_of(self.q_proj), self._heads, self.q_norm.weight, rotated=True)
        if not self._writes:
            return (q,)
        own = None if self._one_projection else matrix_of(self.v_proj)
        k = normed(matrix_of(self.k_proj), self._kv_heads, self.k_norm.weight, rotated=True)
        return q, k, normed(own, self._kv_heads)


def _head_cuts(args: Gemma4Arguments, layer: int) -> Cuts:
    """Return the cuts of a layer's `Attention` by heads."""
    full = args.layer_types[layer] == FULL
    dim = args.global_head_dim if full else args.head_dim
    kv_heads = args.num_global_key_value_heads if full else args.num_key_value_heads
    heads = args.num_attention_heads
    written = rows((kv_heads, dim))
    return {
        "q_proj": rows((heads, dim)),
        "k_proj": written,
        "v_proj": written,
        "o_proj": inputs((heads, dim)),
    }


class Router(Module):
    """Selects each row's experts and their weights."""

    def __init__(self, args: Gemma4Arguments) -> None:
        super().__init__()
        self._eps = args.rms_norm_eps
        self._router = SoftmaxRouter(args.top_k_experts, normalise=True)
        self._root = args.hidden_size**-0.5
        self.proj = nn.Linear(args.hidden_size, args.num_experts, bias=False)
        self.scale = mx.ones(args.hidden_size)
        self.per_expert_scale = mx.ones(args.num_experts)
        self._norm = self.scale, self.scale * self._root

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Map `[T, hidden]` to experts `[T, k]` and float32 weights `[T, k]`."""
        if self._norm[0] is not self.scale:  # the weights were loaded since
            self._norm = self.scale, self.scale * self._root
        operations = current_device().operations
        logits = self.proj(operations.rms_norm(x, self._norm[1], self._eps)).astype(mx.float32)
        return operations.route(
            logits, correction=None, per_expert=self.per_expert_scale, router=self._router
        )


class DecoderLayer(Module):
    """A layer: attention and feed-forward with norms before and after, then the layer's own
    embedding.

    Args:
        before: see `Attention`.
    """

    def __init__(self, args: Gemma4Arguments, index: int, before: int = 0) -> None:
        super().__init__()
        hidden, eps = args.hidden_size, args.rms_norm_eps
        self._part = args.split.part
        self.self_attn = Attention(args, index, before)
        width, _ = args.mlp_width(index)
        self.mlp = GatedMLP(hidden, width, args.hidden_activation)
        self.input_layernorm = RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps=eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps=eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps=eps)
        self.layer_scalar = mx.ones(1)
        self._moe = args.enable_moe_block
        if self._moe:
            self.router = Router(args)
            gating = Gating(args.hidden_activation)
            width, _ = args.expert_width
            self.experts = Experts(args.num_experts, hidden, width, gating=gating)
            self.post_feedforward_layernorm_1 = RMSNorm(hidden, eps=eps)
            self.pre_feedforward_layernorm_2 = RMSNorm(hidden, eps=eps)
            self.post_feedforward_layernorm_2 = RMSNorm(hidden, eps=eps)
        own = args.hidden_size_per_layer_input
        if own:
            self.per_layer_input_gate = nn.Linear(hidden, own, bias=False)
            self.per_layer_projection = nn.Linear(own, hidden, bias=False)
            self.post_per_layer_input_norm = RMSNorm(hidden, eps=eps)
            self._gate = GATES[args.hidden_activation]

    def __call__(
        self, x: mx.array, own: mx.array | None, step: ForwardContext, rotate: Rotate
    ) -> mx.array:
        """Map `[T, hidden]` to the same shape; `own` is `[T, hidden_size_per_layer_input]`
        or None.
        """
        y = summed(self.self_attn(self.input_layernorm(x), step, rotate), self._part)
        x = self.post_attention_layernorm.added(x, y)
        y = self._feed_forward(x)
        if own is None:
            return self.post_feedforward_layernorm.added(x, y, self.layer_scalar)
        x = self.post_feedforward_layernorm.added(x, y)
        y = self.per_layer_projection(self._gate(self.per_layer_input_gate(x), own))
        return self.post_per_layer_input_norm.added(x, y, self.layer_scalar)

    def _feed_forward(self, x: mx.array) -> mx.array:
        y: mx.array = self.mlp(self.pre_feedforward_layernorm(x))
        if not self._moe:
            return summed(y, self._part)
        chosen, weights = self.router(x)
        mixed = self.experts(self.pre_feedforward_layernorm_2(x), chosen, weights)
        if self._part.size > 1:
            both = summed(mx.concatenate([y, mixed], axis=-1), self._part)
            y, mixed = mx.split(both, 2, axis=-1)
        y = self.post_feedforward_layernorm_1(y)
        y += self.post_feedforward_layernorm_2(mixed)
        return y


class Decoder(LayeredDecoder):
    """The model without its head, `model.` in text-only checkpoints."""

    def __init__(self, args: Gemma4Arguments) -> None:
        super().__init__()
        self._args = args
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers: list[Module] = [
            self._layer(args, index) for index in range(args.num_hidden_layers)
        ]
        self.norm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        dims = {SLIDING: args.head_dim, FULL: args.global_head_dim}
        self._ropes = [(kind, Rope(dims[kind], rope)) for kind, rope in sorted(args.rope.items())]
        own = args.hidden_size_per_layer_input
        if own:
            packed = args.num_hidden_layers * own
            self.embed_tokens_per_layer = nn.Embedding(args.vocab_size_per_layer_input, packed)
            self.per_layer_model_projection = nn.Linear(args.hidden_size, packed, bias=False)
            self.per_layer_projection_norm = RMSNorm(own, eps=args.rms_norm_eps)

    def whole(self, step: ForwardContext) -> mx.array:
        """Return normalised hidden states `[T, hidden]`."""
        args = self._args
        x, tokens = self._embedded(step)
        rotations = self._rotations(step)
        own = self._own_embeddings(x, tokens)
        x = self._opened(x)
        parts = self._parts(own)
        for index, layer in enumerate(self.layers):
            # Layers that share others' keys keep nothing: most of a prompt need not go through.
            if index == args.first_shared and (wanted := step.sampled_rows_only()) is not None:
                step, rows = wanted
                x, rotations = x[rows], self._rotations(step)
                parts = self._parts(None if own is None else own[rows])
            x = layer(x, parts[index], step, rotate=rotations[args.layer_types[index]])
        return self.ended(x)

    def embed(self, step: ForwardContext) -> mx.array:
        return self._opened(self._embedded(step)[0])

    def passed(self, x: mx.array, step: ForwardContext, layers: Iterable[int]) -> mx.array:
        rotations = self._rotations(step)
        parts = self._parts(self._own_embeddings(*self._embedded(step)))
        for index in layers:
            kind = self._args.layer_types[index]
            x = self.layers[index](x, parts[index], step, rotate=rotations[kind])
        return x

    def ended(self, x: mx.array) -> mx.array:
        y: mx.array = self.norm(self._closed(x))
        return y

    def _embedded(self, step: ForwardContext) -> tuple[mx.array, mx.array]:
        """Return the rows' embeddings `[T, hidden]`, and the tokens `[T]` that were embedded."""
        tokens = self._looked_up(step)
        x = self.embedded(tokens)
        return x if step.media is None else step.media.replaced(x), tokens

    def _layer(self, args: Gemma4Arguments, index: int) -> Module:
        return DecoderLayer(args, index)

    def embedded(self, tokens: mx.array) -> mx.array:
        """Return scaled token embeddings: `[T]` -> `[T, hidden]`."""
        dtype = self.norm.weight.dtype
        x = embed(self.embed_tokens, tokens, dtype)
        return x * float(self._args.hidden_size**0.5)

    def _opened(self, x: mx.array) -> mx.array:
        """Convert embeddings `[T, hidden]` to the layers' input."""
        return x

    def _closed(self, x: mx.array) -> mx.array:
        """Convert the layers' output to hidden states `[T, hidden]`."""
        return x

    def _looked_up(self, step: ForwardContext) -> mx.array:
        """Return the tokens `[T]` to embed, with padding in place of media tokens."""
        if step.media is None:
            return step.tokens
        padding = mx.array(self._args.pad_token_id, dtype=step.tokens.dtype)
        return mx.where(step.media.placed[:, 0], padding, step.tokens)

    def _rotations(self, step: ForwardContext) -> dict[str, Rotate]:
        """Return the step's rotations by layer type."""
        return {kind: rope(step.positions) for kind, rope in self._ropes}

    def _parts(self, own: mx.array | None) -> list[mx.array | None]:
        """Split `_own_embeddings` by layer."""
        count = len(self.layers)
        return [None] * count if own is None else list(mx.split(own, count, axis=-1))

    def _own_embeddings(self, x: mx.array, tokens: mx.array) -> mx.array | None:
        """Return the layers' embeddings of the tokens, combined with a projection of `x`.

        The shape is `[T, layers * own]`. Return None for models without them.
        """
        args = self._args
        own, layers = args.hidden_size_per_layer_input, args.num_hidden_layers
        if not own:
            return None
        if args.vocab_size_per_layer_input < args.vocab_size:  # media tokens have none
            tokens = mx.where(tokens < args.vocab_size_per_layer_input, tokens, 0)
        looked_up = embed(self.embed_tokens_per_layer, tokens, x.dtype) * own**0.5
        projected = self.per_layer_model_projection(x) * args.hidden_size**-0.5
        projected = self.per_layer_projection_norm(projected.reshape(-1, layers, own))
        mixed: mx.array = (projected.reshape(-1, layers * own) + looked_up) * 2.0**-0.5
        return mixed


class Gemma4(LayeredModel):
    """The text decoder with its head, and the encoders of the checkpoint."""

    def __init__(
        self,
        args: Gemma4Arguments,
        vision: Gemma4VisionArguments | None = None,
        audio: Gemma4AudioArguments | None = None,
    ) -> None:
        super().__init__()
        self.args = args
        self.model = self._decoder(args)
        self.lm_head = (
            None
            if args.tie_word_embeddings
            else nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        )
        self.vision_tower = self.embed_vision = self.audio_tower = self.embed_audio = None
        if vision is not None:
            self.vision_tower = VisionTower(vision)
            self.embed_vision = Projector(vision.hidden_size, args.hidden_size, vision.rms_norm_eps)
        if audio is not None:
            self.audio_tower = AudioTower(audio)
            self.embed_audio = Projector(
                audio.output_proj_dims, args.hidden_size, audio.rms_norm_eps
            )
        self._layout = tuple(args.layer_spec(index) for index in range(args.num_hidden_layers))
        self._lent: tuple[SharedKV, ...] = ()

    def _decoder(self, args: Gemma4Arguments) -> Decoder:
        """Return the model without its head."""
        return Decoder(args)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(
            Gemma4Arguments.from_config(config),
            Gemma4VisionArguments.from_config(config),
            Gemma4AudioArguments.from_config(config),
        )

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        found: dict[str, MediaEncoder] = {}
        if self.vision_tower is not None and self.embed_vision is not None:
            vision = Gemma4VisionEncoder(self.vision_tower, self.embed_vision)
            found |= {"image": vision, "video": vision}  # a video's items are its frames
        if self.audio_tower is not None and self.embed_audio is not None:
            found["audio"] = Gemma4AudioEncoder(self.audio_tower, self.embed_audio)
        return found

    @property
    def layout(self) -> tuple[LayerSpec, ...]:
        return self._layout + self._lent

    @property
    def own_layout(self) -> tuple[LayerSpec, ...]:
        return self._layout

    @property
    def specs_by_layer(self) -> tuple[int, ...]:
        return (1,) * self.args.num_hidden_layers

    def lend_keys(self, layers: tuple[SharedKV, ...]) -> None:
        """Let layers of an assistant read this model's keys and values, from behind its layers."""
        self._lent = layers

    @property
    def vocab_size(self) -> int:
        return self.args.vocab_size

    def __call__(self, step: ForwardContext) -> mx.array:
        return self.model(step)

    def logits(self, hidden: mx.array) -> mx.array:
        cap = self.args.final_logit_softcapping
        logits = project_logits(hidden, self.model.embed_tokens, self.lm_head, softcap=cap)
        return gathered(logits, self.args.split.part)[:, : self.vocab_size]

    def share(self, split: Split) -> tuple[Self, Cuts]:
        own = copy(self)  # encoders are whole on each rank
        own.args = args = self.args.share(split)
        own.model = self._decoder(args)
        own.lm_head = nn.Linear(
            args.hidden_size, head_rows(args.vocab_size, split.part), bias=False
        )
        own._layout = tuple(args.layer_spec(index) for index in range(args.num_hidden_layers))
        cuts: dict[str, Cut] = {}
        for index in range(args.num_hidden_layers):
            _, run = args.mlp_width(index)
            found = within("self_attn", _head_cuts(self.args, index))
            found |= within("mlp", width_cuts(run))
            if args.enable_moe_block:
                _, run = args.expert_width
                found |= within("experts", expert_cuts(run))
            cuts |= within(f"model.layers.{index}", found)
        return own, cuts

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        renamed = {}
        for name, array in weights.items():
            plain = name.removeprefix("model.").removeprefix("language_model.")
            if self._is_unused(plain):
                continue
            if plain.startswith(_AUDIO):
                renamed[plain] = channels_last(plain, array)
            elif plain.startswith(("lm_head.", *_VISION)):
                renamed[plain] = array
            else:
                renamed["model." + plain.removeprefix("model.")] = array
        # Text-only conversions keep the configuration of the encoders that they left out.
        if not any(name.startswith(_VISION) for name in renamed):
            self.vision_tower = self.embed_vision = None
        if not any(name.startswith(_AUDIO) for name in renamed):
            self.audio_tower = self.embed_audio = None
        return stack_experts(renamed)

    def _is_unused(self, name: str) -> bool:
        """Return whether a checkpoint's tensor is not used."""
        if name.startswith("lm_head."):
            return self.lm_head is None
        if name.startswith((*_VISION, *_AUDIO)):
            sees = name.startswith(_VISION)
            if (self.embed_vision if sees else self.embed_audio) is None:
                return True
            tower = self.vision_tower if sees else self.audio_tower
            bound = name.endswith(CLIP_BOUNDS)
            return bound and not (tower is not None and tower.args.use_clipped_linears)
        parts = name.removeprefix("model.").split(".")
        if len(parts) < 4 or parts[0] != "layers" or parts[2] != "self_attn":
            return False
        shared = int(parts[1]) >= self.args.first_shared
        return shared and parts[3] in ("k_proj", "v_proj", "k_norm", "v_norm")
