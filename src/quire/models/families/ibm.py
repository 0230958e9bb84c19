"""Granite 3 and 4: dense, with experts, and with state space layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.base import LanguageModel
from quire.models.description import FeedForward, Layer, Mixer
from quire.models.families.common import (
    Family,
    activation,
    attention,
    by_type,
    channels_last,
    decoder,
    mlp,
    rms,
    softmax_mixture,
    uniform_layers,
)
from quire.models.families.mamba import hybrid_mamba2
from quire.models.layers.feed_forward import MLP
from quire.models.layers.moe import Mixture
from quire.models.layers.routers import SoftmaxRouter
from quire.models.settings import Settings
from quire.models.weights.names import Names, Weights


def granite(s: Settings) -> LanguageModel:
    return _decoder(s, mlp(s))


def granitemoe(s: Settings) -> LanguageModel:
    return _decoder(s, _experts(s), _names(s))


def granitemoehybrid(s: Settings) -> LanguageModel:
    """Build Granite 4. Most layers are state space layers; attention may have no positions."""
    s.only("position_embedding_type", "nope", "rope")
    s = s.filled(num_local_experts=8, shared_intermediate_size=1024)
    if s.integer("num_local_experts", minimum=0):
        block: FeedForward = _experts(s)
    else:
        block = MLP(s.integer("shared_intermediate_size"), activation(s))
    usual = attention(s, scale=s.number("attention_multiplier", default=1.0))
    if s.values.get("position_embedding_type") != "rope":
        usual = replace(usual, rope=None)
    state_space = hybrid_mamba2(s, eps=rms(s).eps)
    mixers: dict[str, Mixer] = {
        "attention": usual,
        "full_attention": usual,
        "mamba": state_space,
        "linear_attention": state_space,
    }
    types = s.layer_types(["mamba"] * s.integer("num_hidden_layers"), mixers)
    return _model(s, by_type(types, mixers, block), _names(s))


def _experts(s: Settings) -> Mixture:
    router = SoftmaxRouter(s.integer("num_experts_per_tok", default=2), normalise=True)
    return softmax_mixture(
        s.filled(num_experts_per_tok=2),
        width=s.integer("intermediate_size"),
        router=router,
        shared_width=s.integer("shared_intermediate_size", default=0, minimum=0),
    )


def _names(s: Settings) -> Names:
    shared = s.integer("shared_intermediate_size", default=0, minimum=0)
    dense = not s.integer("num_local_experts", default=0, minimum=0)
    parts = {
        "block_sparse_moe": "mlp",
        "shared_mlp": "mlp" if dense else "mlp.shared_expert",
        "router.layer": "gate",
        "router": "gate",
        "output_linear": "down_proj",
    }
    fused = {"input_linear": (("gate_proj", shared), ("up_proj", shared))}
    return Names(renamed=parts, fused=fused, prepare=_stacked)


def _stacked(weights: Weights) -> Weights:
    """Rename experts as in other families, and convert convolutions to `[channels, kernel, 1]`."""
    return {
        name.replace(".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj").replace(
            ".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"
        ): array
        for name, array in channels_last(weights).items()
    }


def _decoder(s: Settings, block: FeedForward, names: Names | None = None) -> LanguageModel:
    s.only("position_embedding_type", "rope")
    usual = attention(s, scale=s.number("attention_multiplier", default=1.0))
    return _model(s, uniform_layers(s, usual, block), names)


def _model(s: Settings, layers: tuple[Layer, ...], names: Names | None) -> LanguageModel:
    changes: dict[str, Any] = {
        "embedding_multiplier": s.number("embedding_multiplier", default=1.0),
        "residual_multiplier": s.number("residual_multiplier", default=1.0),
        "head_multiplier": 1 / s.positive("logits_scaling", default=1.0),
    }
    return decoder(s, layers, names, **changes)


FAMILIES = (
    Family("granite", "Granite 3", granite),
    Family("granitemoe", "Granite 3 MoE", granitemoe),
    Family("granitemoehybrid", "Granite 4", granitemoehybrid),
    Family("granitemoeshared", "Granite 3 MoE with a shared expert", granitemoe),
)
