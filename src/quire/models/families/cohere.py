"""Command R, R+, R7B and A, Aya (Cohere)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.device.mixture import Router
from quire.models.base import LanguageModel
from quire.models.description import Layer, Mixer, Norm, NormPlacement
from quire.models.families.common import (
    Family,
    attention,
    by_type,
    decoder,
    dense_by_type,
    full_every,
    mlp,
    rms,
    softmax_mixture,
    uniform_layers,
)
from quire.models.layers.attention import Attention, Over, QKNorm
from quire.models.layers.moe import Mixture
from quire.models.layers.routers import SigmoidRouter, SoftmaxRouter
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import Names


def cohere(s: Settings) -> LanguageModel:
    norm = QKNorm(_norm(s), Over.EACH_HEAD) if s.flag("use_qk_norm", default=False) else None
    return _decoder(
        s, uniform_layers(s, replace(_attention(s, 5e5), qk_norm=norm), mlp(s, bias=False))
    )


def cohere2(s: Settings) -> LanguageModel:
    """Build Command R7B. Sliding layers rotate; full layers have no positions."""
    usual, every = _attention(s, 1e4), s.integer("sliding_window_pattern", default=4)
    mixers: dict[str, Mixer] = {
        FULL: replace(usual, rope=None),
        SLIDING: replace(usual, window=s.window(4096)),
    }
    types = s.layer_types(full_every(s, every))
    return _decoder(s, by_type(types, mixers, mlp(s, bias=False)))


def cohere2_moe(s: Settings) -> LanguageModel:
    """Build a `cohere2` model with experts after the first, dense layers. Dense layers may have
    their own pattern of sliding layers.
    """
    s = s.filled(head_dim=128, num_experts=8, num_experts_per_tok=2)
    count = s.integer("num_hidden_layers")
    first = min(s.integer("first_k_dense_replace", default=0, minimum=0), count)
    dense = dense_by_type(s, first)
    every = s.integer("sliding_window_pattern", default=4)
    ahead = s.integer("prefix_dense_sliding_window_pattern", default=1)
    usually = full_every(s, ahead)[:first] + full_every(s, every)[: count - first]
    usual = _attention(s, 1e4)
    unrotated, sliding = replace(usual, rope=None), replace(usual, window=s.window(4096))
    experts = _experts(s)
    wide = s.integer("prefix_dense_intermediate_size", default=s.integer("intermediate_size"))
    block = mlp(s, bias=False, width=wide)
    layers = []
    for index, kind in enumerate(s.layer_types(usually)):
        full = usual if dense(index) and ahead == 1 else unrotated
        mixer = sliding if kind == SLIDING else full
        layers.append(Layer((mixer,), block if dense(index) else experts))
    norm = rms(s) if s.has("rms_norm_eps") else _norm(s)
    return _decoder(s, tuple(layers), Names(renamed={"shared_experts": "shared_expert"}), norm=norm)


def _experts(s: Settings) -> Mixture:
    s.only("expert_selection_fn", "softmax", "sigmoid")
    s.only("shared_expert_combination_strategy", "average", "sum")
    shared, width = (
        s.integer("num_shared_experts", default=0, minimum=0),
        s.integer("intermediate_size"),
    )
    averaged = shared and s.value("shared_expert_combination_strategy", "average") == "average"
    scale = 0.5 if averaged else 1.0
    k = s.integer("num_experts_per_tok")
    router: Router = SoftmaxRouter(k, normalise=True, scale=scale)
    if s.value("expert_selection_fn") == "sigmoid":
        normalise = s.flag("norm_topk_prob", default=True)
        router = SigmoidRouter(k, normalise, scale, corrected=False)
    return softmax_mixture(
        s, width=width, router=router, shared_width=shared * width, shared_scale=scale
    )


def _attention(s: Settings, theta: float) -> Attention:
    return attention(s, rope=replace(s.rope(theta=theta), interleaved=True))


def _norm(s: Settings) -> Norm:
    return Norm(s.number("layer_norm_eps", default=1e-5, minimum=0.0), centred=True)


def _decoder(
    s: Settings,
    layers: tuple[Layer, ...],
    names: Names | None = None,
    norm: Norm | None = None,
) -> LanguageModel:
    changes: dict[str, Any] = {
        "norm": norm or _norm(s),
        "placement": NormPlacement.PARALLEL,
        "head_multiplier": s.number("logit_scale", default=0.0625),
    }
    return decoder(s, layers, names, tied=True, **changes)


FAMILIES = (
    Family("cohere", "Command R, R+, Aya", cohere),
    Family("cohere2", "Command R7B, Command A", cohere2),
    Family("cohere2_moe", "Command A+, North Mini Code", cohere2_moe),
)
