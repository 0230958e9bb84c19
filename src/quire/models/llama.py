"""Llama 2, 3, 3.1 and 3.2 text, and Mistral, which differs by its window (arXiv:2307.09288)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import FullKV, LayerSpec, WindowKV
from quire.models.arguments import read_arguments, require
from quire.models.base import LanguageModel, Module, Step
from quire.models.layers import ACTIVATIONS, GatedMLP, embed, project_logits
from quire.models.names import without_wrapper
from quire.models.norm import RMSNorm
from quire.models.rope import Rope, RopeParameters, Rotate


@dataclass(frozen=True)
class LlamaArguments:
    """The keys of `config.json` that decide the computation.

    Attributes:
        head_dim: 0 divides the hidden size by the heads.
        sliding_window: tokens that a layer of type `sliding_attention` sees.
        layer_types: one an item a layer; empty is sliding where a window is given, else full.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    rope: RopeParameters = field(default_factory=RopeParameters)

    def __post_init__(self) -> None:
        require("hidden_act", self.hidden_act, ACTIVATIONS)
        for kind in self.layer_types:
            require("layer_types", kind, ("full_attention", "sliding_attention"))


def shape_arguments(config: dict[str, Any], *, partial_rope: bool = False) -> dict[str, Any]:
    """The fields whose values follow from others when `config.json` leaves them out.

    Args:
        partial_rope: see `RopeParameters.from_config`.
    """
    heads = config.get("num_attention_heads") or 0
    return {
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config.get("hidden_size", 0) // max(heads, 1),
        "layer_types": tuple(config.get("layer_types") or ()),
        "rope": RopeParameters.from_config(config, partial=partial_rope),
    }


class Attention(Module):
    """Grouped-query attention; with `qk_norm`, heads of q and k are normalised before rotation."""

    def __init__(self, args: LlamaArguments, layer: int, qk_norm: bool = False) -> None:
        super().__init__()
        hidden, bias = args.hidden_size, args.attention_bias
        self._layer = layer
        self._heads, self._kv_heads = args.num_attention_heads, args.num_key_value_heads
        self._head_dim = args.head_dim
        self._scale = args.head_dim**-0.5
        self.q_proj = nn.Linear(hidden, self._heads * self._head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self._kv_heads * self._head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self._kv_heads * self._head_dim, bias=bias)
        self.o_proj = nn.Linear(self._heads * self._head_dim, hidden, bias=bias)
        self._qk_norm = qk_norm
        if qk_norm:
            self.q_norm = RMSNorm(self._head_dim, eps=args.rms_norm_eps)
            self.k_norm = RMSNorm(self._head_dim, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, step: Step, rotate: Rotate) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        rows, dim = x.shape[0], self._head_dim
        q = self.q_proj(x).reshape(rows, self._heads, dim)
        k = self.k_proj(x).reshape(rows, self._kv_heads, dim)
        v = self.v_proj(x).reshape(rows, self._kv_heads, dim)
        if self._qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        # [T, heads, head_dim]
        out = step.attend(self._layer, rotate(q), rotate(k), v, scale=self._scale)
        y: mx.array = self.o_proj(out.reshape(rows, -1))
        return y


class DecoderLayer(Module):
    """Attention, then a feed-forward block, each on a normalised copy and added back."""

    def __init__(self, args: LlamaArguments, attention: Attention, mlp: Module) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, step: Step, rotate: Rotate) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        x = x + self.self_attn(self.input_layernorm(x), step, rotate)
        y: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Decoder(Module):
    """Everything but the head, named as the checkpoints name it: `model.`"""

    def __init__(self, args: LlamaArguments, layers: list[Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = layers
        self.norm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self._rope = Rope(args.head_dim, args.rope)

    def __call__(self, step: Step) -> mx.array:
        """Normalised hidden states `[T, hidden]`."""
        x = embed(self.embed_tokens, step.tokens, self.norm.weight.dtype)
        if step.media is not None:
            x = step.media.placed(x)
        rotate = self._rope(step.positions)
        for layer in self.layers:
            x = layer(x, step, rotate)
        y: mx.array = self.norm(x)
        return y


class Llama(LanguageModel):
    """A decoder of equal layers with one RoPE. Families that differ in a block override it."""

    def __init__(self, args: LlamaArguments) -> None:
        super().__init__()
        self.args = args
        indices = range(args.num_hidden_layers)
        self.model = Decoder(args, [self.decoder_layer(args, index) for index in indices])
        self.lm_head = (
            None
            if args.tie_word_embeddings
            else nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        )
        self._layout = tuple(self.layer_spec(args, index) for index in indices)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(read_arguments(LlamaArguments, config, **shape_arguments(config)))

    def decoder_layer(self, args: LlamaArguments, index: int) -> Module:
        """Layer `index`: a module that is called like `DecoderLayer`."""
        return DecoderLayer(args, Attention(args, index), self.feed_forward(args, index))

    def feed_forward(self, args: LlamaArguments, index: int) -> Module:
        """The block after layer `index`'s attention."""
        return GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act, args.mlp_bias)

    def layer_spec(self, args: LlamaArguments, index: int) -> LayerSpec:
        """What layer `index` keeps."""
        sliding = not args.layer_types or args.layer_types[index] == "sliding_attention"
        if args.sliding_window is not None and sliding:
            return WindowKV(args.num_key_value_heads, args.head_dim, args.sliding_window)
        return FullKV(args.num_key_value_heads, args.head_dim)

    @property
    def layout(self) -> tuple[LayerSpec, ...]:
        return self._layout

    @property
    def vocab_size(self) -> int:
        return self.args.vocab_size

    def __call__(self, step: Step) -> mx.array:
        return self.model(step)

    def logits(self, hidden: mx.array) -> mx.array:
        return project_logits(hidden, self.model.embed_tokens, self.lm_head)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        kept = {
            without_wrapper(name): array
            for name, array in weights.items()
            if not name.endswith("rotary_emb.inv_freq")  # a constant that old files carry along
        }
        if self.lm_head is None:
            kept = {name: array for name, array in kept.items() if not name.startswith("lm_head.")}
        return kept
