"""Qwen3.5 text, dense and mixture of experts: delta-net layers, every fourth full attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import FullKV, LayerSpec
from quire.models.arguments import read_arguments, require
from quire.models.base import Module, Step
from quire.models.gated_delta import GatedDeltaNet, GatedDeltaShape
from quire.models.layers import ACTIVATIONS, GatedMLP
from quire.models.llama import Llama, LlamaArguments, shape_arguments
from quire.models.moe import SparseMoE, stack_experts
from quire.models.norm import RMSNorm
from quire.models.rope import Rotate

FULL, LINEAR = "full_attention", "linear_attention"

_DEFAULT_SECTION = (11, 11, 10)

# Parts of the checkpoint that the text decoder has no use for: the vision tower, and the extra
# layers that guess several tokens ahead.
_UNUSED = ("model.visual.", "visual.", "vision_tower.", "mtp.")

# Norms whose weight Hugging Face stores as the difference from one.
_ZERO_CENTRED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "q_norm.weight",
    "k_norm.weight",
    "model.norm.weight",
)


@dataclass(frozen=True)
class Qwen35Arguments(LlamaArguments):
    """What Qwen3.5 adds to Llama's arguments.

    Attributes:
        num_experts: 0 in the dense models; the others have no `intermediate_size` (0).
    """

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    num_experts: int = 0
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512

    def __post_init__(self) -> None:
        require("hidden_act", self.hidden_act, ACTIVATIONS)
        for kind in self.layer_types:
            require("layer_types", kind, (FULL, LINEAR))

    @property
    def delta(self) -> GatedDeltaShape:
        """The shape of the linear layers."""
        return GatedDeltaShape(
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )


class GatedAttention(Module):
    """Full attention whose output passes a gate; the queries' projection carries the gate too."""

    def __init__(self, args: Qwen35Arguments, layer: int) -> None:
        super().__init__()
        hidden, bias, dim = args.hidden_size, args.attention_bias, args.head_dim
        self._layer, self._head_dim, self._scale = layer, dim, dim**-0.5
        self._heads, self._kv_heads = args.num_attention_heads, args.num_key_value_heads
        self.q_proj = nn.Linear(hidden, 2 * self._heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self._kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self._kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(self._heads * dim, hidden, bias=bias)
        self.q_norm = RMSNorm(dim, eps=args.rms_norm_eps)
        self.k_norm = RMSNorm(dim, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, step: Step, rotate: Rotate) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        rows, dim = x.shape[0], self._head_dim
        q, gate = mx.split(self.q_proj(x).reshape(rows, self._heads, 2 * dim), 2, axis=-1)
        q = rotate(self.q_norm(q))
        k = rotate(self.k_norm(self.k_proj(x).reshape(rows, self._kv_heads, dim)))
        v = self.v_proj(x).reshape(rows, self._kv_heads, dim)
        out = step.attend(self._layer, q, k, v, scale=self._scale)  # [T, heads, head_dim]
        y: mx.array = self.o_proj((out * mx.sigmoid(gate)).reshape(rows, -1))
        return y


class SharedSparseMoE(SparseMoE):
    """Experts, and one more that every row passes through, weighted by a gate of its own."""

    def __init__(self, args: Qwen35Arguments) -> None:
        super().__init__(
            args.hidden_size,
            args.moe_intermediate_size,
            args.num_experts,
            args.num_experts_per_tok,
            args.hidden_act,
            normalise=True,
        )
        self.shared_expert = GatedMLP(
            args.hidden_size, args.shared_expert_intermediate_size, args.hidden_act
        )
        self.shared_expert_gate = nn.Linear(args.hidden_size, 1, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        shared = mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return super().__call__(x) + shared


class HybridLayer(Module):
    """A decoder layer that mixes tokens by one of the two kinds of attention."""

    def __init__(self, args: Qwen35Arguments, index: int) -> None:
        super().__init__()
        eps, self._full = args.rms_norm_eps, args.layer_types[index] == FULL
        if self._full:
            self.self_attn = GatedAttention(args, index)
        else:
            self.linear_attn = GatedDeltaNet(
                args.hidden_size, args.delta, index, args.hidden_act, eps
            )
        self.mlp = (
            SharedSparseMoE(args)
            if args.num_experts
            else GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act)
        )
        self.input_layernorm = RMSNorm(args.hidden_size, eps=eps)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, eps=eps)

    def __call__(self, x: mx.array, step: Step, rotate: Rotate) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        y = self.input_layernorm(x)
        x = x + (self.self_attn(y, step, rotate) if self._full else self.linear_attn(y, step))
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen35(Llama):
    """The text decoder with its head; reads text-only and multimodal checkpoints."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        # A multimodal file says at its top whether the head is tied.
        tied = config.get("tie_word_embeddings", False)
        text = {"tie_word_embeddings": tied} | (config.get("text_config") or config)
        rope = {
            "partial_rotary_factor": text.get("partial_rotary_factor", 0.25),
            "mrope_section": _DEFAULT_SECTION,
        } | (text.get("rope_parameters") or text.get("rope_scaling") or {})
        every = text.get("full_attention_interval", 4)
        types = text.get("layer_types") or [
            LINEAR if (index + 1) % every else FULL
            for index in range(text.get("num_hidden_layers", 0))
        ]
        width = text.get("intermediate_size") or 0
        text |= {"layer_types": types, "intermediate_size": width}
        text |= {"rope_parameters": rope, "rope_scaling": None}
        computed = shape_arguments(text, partial_rope=True)
        return cls(read_arguments(Qwen35Arguments, text, **computed))

    def decoder_layer(self, args: LlamaArguments, index: int) -> Module:
        assert isinstance(args, Qwen35Arguments)
        return HybridLayer(args, index)

    def layer_spec(self, args: LlamaArguments, index: int) -> LayerSpec:
        assert isinstance(args, Qwen35Arguments)
        if args.layer_types[index] == LINEAR:
            return args.delta.state
        return FullKV(args.num_key_value_heads, args.head_dim)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        kept = {name: array for name, array in weights.items() if not name.startswith(_UNUSED)}
        renamed = super().sanitize(stack_experts(kept))
        if not _converted(weights):
            for name, array in renamed.items():
                if name.endswith(".conv1d.weight"):
                    renamed[name] = array.swapaxes(-1, -2)
                elif name.endswith(_ZERO_CENTRED):
                    renamed[name] = array + 1.0
        return renamed


def _converted(weights: dict[str, mx.array]) -> bool:
    """Whether a conversion to MLX put the channel last in convolutions and added one to norms."""
    for name, array in weights.items():
        if name.endswith(".conv1d.weight"):
            return bool(array.shape[-1] == 1)
    return any(name.startswith("language_model.model.") for name in weights)  # MLX's prefix
