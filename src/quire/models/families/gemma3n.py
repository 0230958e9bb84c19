"""Gemma 3n, E2B and E4B (Google's model cards).

It shares attention and per-layer embeddings with Gemma 4. In addition, a token has several hidden
states, of which each layer computes one and predicts the others (AltUp, arXiv:2301.13310); a
low-rank path runs beside attention (LAuReL, arXiv:2411.07501); and feed-forward blocks cut off most
of their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Self, cast

import mlx.core as mx
import mlx.nn as nn

from quire.core.errors import ModelError
from quire.device.collectives import summed
from quire.device.device import current_device
from quire.device.ranks import WHOLE
from quire.models.arguments import read_arguments
from quire.models.audio.gemma3n import (
    Gemma3nAudioArguments,
    Gemma3nAudioEncoder,
    Gemma3nAudioTower,
    audio_name,
)
from quire.models.base import ForwardContext, MediaEncoder, Module
from quire.models.families.gemma4 import Attention, Decoder, Gemma4
from quire.models.families.gemma4_arguments import Gemma4Arguments
from quire.models.layers.common import GATES
from quire.models.layers.gemma3n_embedder import Embedder, OwnTokens
from quire.models.layers.norm import RMSNorm
from quire.models.layers.rope import RopeParameters, Rotate
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.shares import Cuts, Run, Split
from quire.models.vision.gemma3n import (
    Gemma3nVisionArguments,
    Gemma3nVisionEncoder,
    vision_tensors,
)
from quire.models.vision.mobilenet import MobileNetTower

_THETA = {SLIDING: 1e4, FULL: 1e6}
_LEAST_SQUARE = 1e-5
"""Lower bound of the mean square by whose root a hidden state is divided."""


@dataclass(frozen=True)
class Gemma3nArguments(Gemma4Arguments):
    """The keys of the text part of `config.json` that affect the computation.

    Attributes:
        intermediate_sizes: inner widths of the feed-forward blocks, one per layer.
        activation_sparsity_pattern: share of a feed-forward block's values that is cut off, one per
            layer.
        altup_num_inputs: number of hidden states of a token.
        altup_active_idx: index of the hidden state that layers compute.
        altup_correct_scale: whether the input of the gate of a layer's embedding is scaled.
        laurel_rank: rank of the path beside attention.
    """

    intermediate_sizes: tuple[int, ...] = ()
    activation_sparsity_pattern: tuple[float, ...] = ()
    altup_num_inputs: int = 4
    altup_active_idx: int = 0
    altup_correct_scale: bool = True
    laurel_rank: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.intermediate_sizes) != self.num_hidden_layers:
            raise ModelError(
                f"config.json: {len(self.intermediate_sizes)} intermediate_sizes for "
                f"{self.num_hidden_layers} layers"
            )
        if not all(0 <= share < 1 for share in self.activation_sparsity_pattern):
            raise ModelError(
                "config.json: activation_sparsity_pattern is not of numbers from 0 to below 1"
            )
        if not self.hidden_size_per_layer_input:
            raise ModelError("config.json: hidden_size_per_layer_input of Gemma 3n is 0")
        if not 0 <= self.altup_active_idx < self.altup_num_inputs:
            raise ModelError(
                f"config.json: altup_active_idx = {self.altup_active_idx} of "
                f"{self.altup_num_inputs} hidden states"
            )

    def mlp_width(self, index: int) -> tuple[int, Run]:
        return self.split.width(self.intermediate_sizes[index])

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        s = Settings(config).within("text_config").filled(**_DEFAULTS)
        layers = range(s.integer("num_hidden_layers"))
        listed = isinstance(s.values["intermediate_size"], list)
        widths = s.integers("intermediate_size") if listed else (s.integer("intermediate_size"),)
        sparse = [0.95 if len(layers) > 10 and index < 10 else 0.0 for index in layers]
        return read_arguments(
            cls,
            s.values,
            split=Split(WHOLE),
            layer_types=s.layer_types([SLIDING if (i + 1) % 5 else FULL for i in layers]),
            intermediate_size=max(widths, default=0),
            intermediate_sizes=widths if listed else widths * len(layers),
            activation_sparsity_pattern=s.numbers("activation_sparsity_pattern", sparse),
            global_head_dim=s.integer("head_dim"),
            num_global_key_value_heads=s.integer("num_key_value_heads"),
            rope=_rotations(s),
        )


_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_kv_shared_layers": 15,
    "final_logit_softcapping": 30.0,
}


def _rotations(s: Settings) -> dict[str, RopeParameters]:
    """Return the rotary parameters by layer type, from either spelling."""
    by_kind = s.nested("rope_parameters", needed=False)
    if not by_kind.values:
        stretched = s.nested("rope_scaling", needed=False).values
        full = {"rope_theta": s.values.get("rope_theta"), **stretched}
        sliding = {"rope_theta": s.values.get("rope_local_base_freq")}
        by_kind = s.like({FULL: full, SLIDING: sliding})
    rotations = {}
    for kind, theta in _THETA.items():
        part = by_kind.nested(kind, needed=False).filled(rope_theta=theta)
        rotations[kind] = RopeParameters.from_dict(part.values)
    return rotations


class Laurel(Module):
    """A low-rank path beside attention (arXiv:2411.07501)."""

    def __init__(self, args: Gemma3nArguments) -> None:
        super().__init__()
        self.linear_left = nn.Linear(args.hidden_size, args.laurel_rank, bias=False)
        self.linear_right = nn.Linear(args.laurel_rank, args.hidden_size, bias=False)
        self.post_laurel_norm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        return self.post_laurel_norm.added(x, self.linear_right(self.linear_left(x)))


class SparseMLP(Module):
    """A gated MLP of whose gate only the largest values pass."""

    def __init__(self, args: Gemma3nArguments, index: int) -> None:
        super().__init__()
        hidden, (width, _) = args.hidden_size, args.mlp_width(index)
        self._whole, self._part = args.intermediate_sizes[index], args.split.part
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)
        self._gate = GATES[args.hidden_activation]
        share = args.activation_sparsity_pattern[index]
        self._deviations = NormalDist().inv_cdf(share) if share else None

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        gate = self.gate_proj(x)
        if self._deviations is not None:
            # The cut assumes normally distributed values. Sums in bfloat16 would lose digits.
            wide = gate.astype(mx.float32)
            mean = self._mean(wide)
            deviation = mx.sqrt(self._mean(mx.square(wide - mean)))
            cut = mean + deviation * self._deviations
            gate = mx.maximum(gate - cut.astype(gate.dtype), 0.0)
        y: mx.array = self.down_proj(self._gate(gate, self.up_proj(x)))
        return y

    def _mean(self, x: mx.array) -> mx.array:
        """Return the mean over all ranks' values, `[T, 1]`."""
        return summed(x.sum(axis=-1, keepdims=True), self._part) / self._whole


class AltUp(Module):
    """Predicts a token's hidden states, and corrects them by the computed one."""

    def __init__(self, args: Gemma3nArguments) -> None:
        super().__init__()
        self._args, states = args, args.altup_num_inputs
        self.correct_output_scale = mx.zeros((args.hidden_size,))
        self.correction_coefs = nn.Linear(states, states, bias=False)
        self.prediction_coefs = nn.Linear(states, states**2, bias=False)
        self.modality_router = nn.Linear(args.hidden_size, states, bias=False)
        self.router_norm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def predict(self, states: mx.array) -> mx.array:
        """Predict the states: `[T, states, hidden]` -> `[T, states, hidden]`."""
        count = self._args.altup_num_inputs
        mixture = self.prediction_coefs(self._route(states[:, self._args.altup_active_idx]))
        return mixture.reshape(-1, count, count) @ states + states

    def correct(self, predicted: mx.array, computed: mx.array) -> mx.array:
        """Correct predicted states `[T, states, hidden]` by the computed one `[T, hidden]`."""
        shares = self.correction_coefs(self._route(computed)) + 1.0
        missed = computed - predicted[:, self._args.altup_active_idx]
        corrected: mx.array = predicted + shares[:, :, None] * missed[:, None]
        return corrected

    def _route(self, x: mx.array) -> mx.array:
        """Return the router's outputs: `[T, hidden]` -> `[T, states]`."""
        routed = self.modality_router(self.router_norm(x) * self._args.hidden_size**-1.0)
        return current_device().operations.tanh(routed.astype(mx.float32)).astype(x.dtype)


class DecoderLayer(Module):
    """A layer: attention with LAuReL, feed-forward, and the layer's own embedding, within AltUp."""

    def __init__(self, args: Gemma3nArguments, index: int) -> None:
        super().__init__()
        hidden, eps, own = args.hidden_size, args.rms_norm_eps, args.hidden_size_per_layer_input
        self._args = args
        self.self_attn = Attention(args, index)
        self.mlp = SparseMLP(args, index)
        self.input_layernorm = RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps=eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps=eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps=eps)
        self.altup = AltUp(args)
        self.laurel = Laurel(args)
        self.per_layer_input_gate = nn.Linear(hidden, own, bias=False)
        self.per_layer_projection = nn.Linear(own, hidden, bias=False)
        self.post_per_layer_input_norm = RMSNorm(hidden, eps=eps)
        self._gate = GATES[args.hidden_activation]

    def __call__(
        self, states: mx.array, own: mx.array | None, step: ForwardContext, rotate: Rotate
    ) -> mx.array:
        """Map `[T, states, hidden]` to the same shape; `own` is `[T,
        hidden_size_per_layer_input]`.
        """
        assert own is not None
        args = self._args
        predicted = self.altup.predict(states)
        active = predicted[:, args.altup_active_idx]
        x = self.input_layernorm(active)
        part = args.split.part
        mixed = summed(self.self_attn(x, step, rotate), part)
        attended = self.post_attention_layernorm.added(active, mixed)
        y = (attended + self.laurel(x)) * 2.0**-0.5
        fed = summed(self.mlp(self.pre_feedforward_layernorm(y)), part)
        y = self.post_feedforward_layernorm.added(y, fed)
        corrected = self.altup.correct(predicted, y)
        first = corrected[:, args.altup_active_idx]
        if args.altup_correct_scale:
            first = first * self.altup.correct_output_scale
        added = self.per_layer_projection(self._gate(self.per_layer_input_gate(first), own))
        added = self.post_per_layer_input_norm(added)
        rest = corrected[:, 1:] + added[:, None]
        return mx.concatenate([corrected[:, :1], rest], axis=1)


class Gemma3nDecoder(Decoder):
    """The model without its head."""

    def __init__(self, args: Gemma3nArguments) -> None:
        super().__init__(args)
        self._own_tokens: list[OwnTokens] = []
        hidden, others = args.hidden_size, args.altup_num_inputs - 1
        self.altup_projections = [nn.Linear(hidden, hidden, bias=False) for _ in range(others)]
        self.altup_unembed_projections = [
            nn.Linear(hidden, hidden, bias=False) for _ in range(others)
        ]

    def embed_own(self, embedder: Embedder) -> None:
        """Use an encoder's embeddings for the encoder's own tokens."""
        self._own_tokens.append(OwnTokens(embedder))

    def embedded(self, tokens: mx.array) -> mx.array:
        x = super().embedded(tokens)
        for own in self._own_tokens:
            x = own.placed(x, tokens)
        return x

    def _layer(self, args: Gemma4Arguments, index: int) -> Module:
        assert isinstance(args, Gemma3nArguments)
        return DecoderLayer(args, index)

    def _opened(self, x: mx.array) -> mx.array:
        """Make all states from the first, of equal magnitude: `[T, hidden]` -> `[T, states,
        hidden]`.
        """
        others = [project(x) for project in self.altup_projections]
        return mx.stack([x, *(_as_large(other, x) for other in others)], axis=1)

    def _closed(self, x: mx.array) -> mx.array:
        """Average the projected states: `[T, states, hidden]` -> `[T, hidden]`."""
        first = x[:, 0]
        others = [
            project(x[:, number])
            for number, project in enumerate(self.altup_unembed_projections, start=1)
        ]
        stacked = mx.stack([first, *(_as_large(other, first) for other in others)], axis=1)
        return stacked.mean(axis=1)


def _as_large(x: mx.array, other: mx.array) -> mx.array:
    """Scale `x` to the mean square of `other`, both `[T, hidden]`."""
    wanted, found = (
        mx.square(each.astype(mx.float32)).mean(axis=-1, keepdims=True) for each in (other, x)
    )
    found = mx.maximum(found, _LEAST_SQUARE)
    return x * mx.sqrt(wanted).astype(x.dtype) / mx.sqrt(found).astype(x.dtype)


class Gemma3n(Gemma4):
    """The text decoder with its head, and the encoders of the checkpoint."""

    def __init__(
        self,
        args: Gemma3nArguments,
        vision: Gemma3nVisionArguments | None = None,
        audio: Gemma3nAudioArguments | None = None,
    ) -> None:
        super().__init__(args)
        # These modules have Gemma 4's attribute names but other types.
        if vision is not None:
            self.vision_tower = cast("Any", MobileNetTower(vision.net))
            self.embed_vision = cast("Any", Embedder(vision))
        if audio is not None:
            self.audio_tower = cast("Any", Gemma3nAudioTower(audio))
            self.embed_audio = cast("Any", Embedder(audio))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(
            Gemma3nArguments.from_config(config),
            Gemma3nVisionArguments.from_config(config),
            Gemma3nAudioArguments.from_config(config),
        )

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        found: dict[str, MediaEncoder] = {}
        vision_tower, audio_tower = cast("Any", self.vision_tower), cast("Any", self.audio_tower)
        if vision_tower is not None:
            found["image"] = Gemma3nVisionEncoder(vision_tower, cast("Any", self.embed_vision))
        if audio_tower is not None:
            found["audio"] = Gemma3nAudioEncoder(audio_tower, cast("Any", self.embed_audio))
        return found

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        seen = {name: array for name, array in weights.items() if "vision_tower." in name}
        others = {
            audio_name(name) if "audio_tower." in name else name: array
            for name, array in weights.items()
            if name not in seen
        }
        ready = super().sanitize(others | vision_tensors(seen))
        self._embed_own()
        return ready

    def share(self, split: Split) -> tuple[Self, Cuts]:
        own, cuts = super().share(split)
        own._embed_own()
        return own, cuts

    def _embed_own(self) -> None:
        decoder: Any = self.model
        for embedder in (self.embed_vision, self.embed_audio):
            if embedder is not None:
                decoder.embed_own(embedder)

    def _decoder(self, args: Gemma4Arguments) -> Decoder:
        assert isinstance(args, Gemma3nArguments)
        return Gemma3nDecoder(args)
