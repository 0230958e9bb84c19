"""Granite 3 and its mixtures of experts."""

from __future__ import annotations

from typing import Any

from quire.models.base import LanguageModel
from quire.models.description import FeedForward
from quire.models.families.common import (
    Family,
    alike,
    attention,
    decoder,
    mlp,
    softmax_mixture,
)
from quire.models.moe import SoftmaxRouter
from quire.models.names import Names, Weights
from quire.models.settings import Settings


def granite(s: Settings) -> LanguageModel:
    return _decoder(s, mlp(s))


def granitemoe(s: Settings) -> LanguageModel:
    router = SoftmaxRouter(s.integer("num_experts_per_tok", default=2), normalise=True)
    shared = s.integer("shared_intermediate_size", default=0)
    width = s.integer("intermediate_size")
    experts = softmax_mixture(s, width=width, router=router, shared_width=shared)
    parts = {
        "block_sparse_moe": "mlp",
        "shared_mlp": "mlp.shared_expert",
        "router.layer": "gate",
        "router": "gate",
        "output_linear": "down_proj",
    }
    fused = {"input_linear": (("gate_proj", shared), ("up_proj", shared))}
    return _decoder(s, experts, Names(renamed=parts, fused=fused, prepare=_stacked))


def _stacked(weights: Weights) -> Weights:
    """The experts' matrices by the names that they have in other families."""
    return {
        name.replace(".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj").replace(
            ".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"
        ): array
        for name, array in weights.items()
    }


def _decoder(s: Settings, block: FeedForward, names: Names | None = None) -> LanguageModel:
    s.only("position_embedding_type", "rope")
    usual = attention(s, scale=s.number("attention_multiplier", default=1.0))
    changes: dict[str, Any] = {
        "embedding_multiplier": s.number("embedding_multiplier", default=1.0),
        "residual_multiplier": s.number("residual_multiplier", default=1.0),
        "head_multiplier": 1 / s.number("logits_scaling", default=1.0),
    }
    return decoder(s, alike(s, usual, block), names, **changes)


FAMILIES = (
    Family("granite", "Granite 3", granite),
    Family("granitemoe", "Granite 3 MoE", granitemoe),
    Family("granitemoeshared", "Granite 3 MoE with a shared expert", granitemoe),
)
