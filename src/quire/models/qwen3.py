"""Qwen3, dense and mixture of experts (arXiv:2505.09388): Llama with normalised heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from quire.errors import ModelError
from quire.models.arguments import read_arguments
from quire.models.base import Module
from quire.models.layers import GatedMLP
from quire.models.llama import Attention, DecoderLayer, Llama, LlamaArguments, shape_arguments
from quire.models.moe import SparseMoE, stack_experts


def window_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """The sliding window, off unless `use_sliding_window`, then from `max_window_layers` on."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 0) if window else config["num_hidden_layers"]
        types = [
            "sliding_attention" if layer >= first else "full_attention"
            for layer in range(config["num_hidden_layers"])
        ]
    return {"sliding_window": window, "layer_types": tuple(types)}


class Qwen3(Llama):
    """The dense model."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        computed = shape_arguments(config) | window_arguments(config)
        return cls(read_arguments(LlamaArguments, config, **computed))

    def decoder_layer(self, args: LlamaArguments, index: int) -> Module:
        attention = Attention(args, index, qk_norm=True)
        return DecoderLayer(args, attention, self.feed_forward(args, index))


@dataclass(frozen=True)
class Qwen3MoEArguments(LlamaArguments):
    """What the mixture of experts adds.

    Attributes:
        norm_topk_prob: the chosen experts' weights sum to one.
        decoder_sparse_step, mlp_only_layers: which layers have a dense block instead.
    """

    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            if not getattr(self, name):
                raise ModelError(f"config.json of a {self.model_type!r} model lacks {name!r}")


class Qwen3MoE(Qwen3):
    """The mixture of experts."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        experts = config.get("num_experts") or config.get("num_local_experts")
        # All layers have the window, whatever `max_window_layers` says.
        computed = shape_arguments(config) | window_arguments(config) | {"layer_types": ()}
        dense = tuple(config.get("mlp_only_layers") or ())
        return cls(
            read_arguments(
                Qwen3MoEArguments, config, num_experts=experts, mlp_only_layers=dense, **computed
            )
        )

    def feed_forward(self, args: LlamaArguments, index: int) -> Module:
        assert isinstance(args, Qwen3MoEArguments)
        sparse = (index + 1) % args.decoder_sparse_step == 0
        if index in args.mlp_only_layers or not sparse:
            return GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act)
        return SparseMoE(
            args.hidden_size,
            args.moe_intermediate_size,
            args.num_experts,
            args.num_experts_per_tok,
            args.hidden_act,
            normalise=args.norm_topk_prob,
        )

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return stack_experts(super().sanitize(weights))
