"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.families.common import (
    Family,
    attention,
    decoder,
    mlp,
    rms,
    softmax_mixture,
    uniform_layers,
    with_dense,
)
from quire.models.layers.attention import Attention
from quire.models.layers.routers import SoftmaxRouter
from quire.models.settings import Settings
from quire.models.weights.names import Names, Weights


def ernie4_5(s: Settings) -> LanguageModel:
    layers = uniform_layers(s, _attention(s), mlp(s, bias=_bias(s)))
    return decoder(s, layers, tied=True, norm=rms(s, 1e-5))


def _bias(s: Settings) -> bool:
    return s.flag("use_bias", default=False)


def _attention(s: Settings) -> Attention:
    rope = replace(s.rope(theta=5e5), interleaved=True)
    return attention(s, rope=rope, qkv_bias=_bias(s), out_bias=_bias(s))


def ernie4_5_moe(s: Settings) -> LanguageModel:
    s.only("use_bias", False)
    s.only("moe_norm_min", 1e-12)
    width = s.integer("moe_intermediate_size")
    k = s.integer("moe_k", "num_experts_per_tok", default=6)
    experts = softmax_mixture(
        s.changed(num_experts=s.integer("moe_num_experts", "num_experts"), num_experts_per_tok=k),
        router=SoftmaxRouter(k, normalise=True, corrected=True),
        shared_width=width * s.integer("moe_num_shared_experts", default=2, minimum=0),
    )
    count, every = s.integer("num_hidden_layers"), s.integer("moe_layer_interval", default=1)
    first = s.integer("moe_layer_start_index", default=1, minimum=0)
    last = s.integer("moe_layer_end_index", default=-1, minimum=-1)
    last = count - 1 if last == -1 else last

    def dense(index: int) -> bool:
        return not first <= index <= last or (index + 1) % every != 0

    layers = with_dense(uniform_layers(s, _attention(s), experts), mlp(s, bias=False), dense)
    names = Names(
        renamed={
            "shared_experts": "shared_expert",
            "moe_statics.e_score_correction_bias": "e_score_correction_bias",
        },
        unused=("mtp",),
        zero_if_absent=("e_score_correction_bias",),  # mlx-lm's conversions
        prepare=_flat,
    )
    return decoder(s, layers, names, tied=True, norm=rms(s, 1e-5))


def _flat(weights: Weights) -> Weights:
    """Return routers' biases, stored as one-row matrices, as vectors."""
    return {
        name: array.flatten() if name.endswith("e_score_correction_bias") else array
        for name, array in weights.items()
    }


FAMILIES = (
    Family("ernie4_5", "ERNIE 4.5", ernie4_5),
    Family("ernie4_5_moe", "ERNIE 4.5 MoE", ernie4_5_moe),
)
