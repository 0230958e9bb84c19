"""Granite 3 and 4: dense, with experts, with state space layers, and with windows."""

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
    windows,
)
from quire.models.families.mamba import hybrid_mamba2
from quire.models.layers.feed_forward import MLP
from quire.models.layers.moe import Mixture
from quire.models.layers.routers import SoftmaxRouter
from quire.models.settings import FULL, SLIDING, Settings
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


def granite_swa(s: Settings) -> LanguageModel:
    return _sliding(s.filled(tie_word_embeddings=True, rms_norm_eps=1e-5), mlp(s))


def granitemoe_swa(s: Settings) -> LanguageModel:
    return _sliding(s, _experts(s), _names(s))


def _sliding(s: Settings, block: FeedForward, names: Names | None = None) -> LanguageModel:
    """Build a decoder most of whose layers have a window. Each may have a rotary base of its own,
    of which zero stands for no rotation.
    """
    rope, count = s.rope(), s.integer("num_hidden_layers")
    scale = s.number("attention_multiplier", default=1.0)
    mixers = windows(s, attention(s, scale=scale, rope=rope, sinks=True), 128)
    types = s.layer_types([SLIDING if index % 4 else FULL for index in range(count)])
    bases = s.numbers("layer_rope_theta", (rope.rope_theta,) * count)
    own = (replace(rope, rope_theta=base) if base else None for base in bases)
    layers = tuple(
        Layer((replace(mixers[kind], rope=each),), block)
        for kind, each in zip(types, own, strict=True)
    )
    return _model(s, layers, names)


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
    Family("granite_swa", "Granite with windows", granite_swa),
    Family("granitemoe", "Granite 3 MoE", granitemoe),
    Family("granitemoe_swa", "Granite MoE with windows", granitemoe_swa),
    Family("granitemoehybrid", "Granite 4", granitemoehybrid),
    Family("granitemoeshared", "Granite 3 MoE with a shared expert", granitemoe),
)
