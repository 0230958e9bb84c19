"""OLMo (arXiv:2402.00838), OLMo 2 (arXiv:2501.00656), OLMo 3, OLMoE (arXiv:2409.02060) and
FlexOlmo (arXiv:2507.07024).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import mlx.core as mx

from quire.models.base import LanguageModel
from quire.models.description import Mixer, Norm, NormPlacement
from quire.models.families.common import (
    Family,
    attention,
    by_type,
    decoder,
    full_every,
    mlp,
    rms,
    softmax_mixture,
    uniform_layers,
)
from quire.models.layers.attention import Over, QKNorm
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import Names, Weights, float_type


def olmo(s: Settings) -> LanguageModel:
    """Build OLMo. Its norms have no weights in checkpoints; `_with_norms` adds ones."""
    layers = uniform_layers(s, attention(s, clip=_clip(s)), mlp(s, bias=False))
    prepare = partial(_with_norms, hidden_size=s.integer("hidden_size"), layers=len(layers))
    return decoder(s, layers, Names(prepare=prepare), norm=Norm(1e-5, centred=True))


def _with_norms(weights: Weights, *, hidden_size: int, layers: int) -> Weights:
    """Add weights of one for all norms, in the type of the checkpoint's weights."""
    one = mx.ones(hidden_size, dtype=float_type(weights))
    norms = [f"layers.{i}.{part}_layernorm" for i in range(layers) for part in _NORMED]
    return {f"model.{name}.weight": one for name in (*norms, "norm")} | weights


_NORMED = ("input", "post_attention")


def olmo2(s: Settings) -> LanguageModel:
    norm = rms(s, 1e-5)
    usual = attention(s, qk_norm=QKNorm(norm, Over.ALL_HEADS))
    layers = uniform_layers(s, usual, mlp(s, bias=False))
    return decoder(s, layers, norm=norm, placement=NormPlacement.POST)


def olmo3(s: Settings) -> LanguageModel:
    norm = rms(s, 1e-5)
    usual = attention(s, qk_norm=QKNorm(norm, Over.ALL_HEADS), rope=None)
    theta = s.positive("rope_theta", default=5e5)
    full, sliding = s.rope_by_type(theta, theta)
    mixers: dict[str, Mixer] = {
        FULL: replace(usual, rope=full),
        SLIDING: replace(usual, rope=sliding, window=s.window(4096)),
    }
    types = s.layer_types(full_every(s, 4))
    layers = by_type(types, mixers, mlp(s, bias=False))
    return decoder(s, layers, norm=norm, placement=NormPlacement.POST)


def olmoe(s: Settings) -> LanguageModel:
    norm = rms(s, 1e-5)
    usual = attention(s, qk_norm=QKNorm(norm, Over.ALL_HEADS), clip=_clip(s))
    return decoder(
        s,
        uniform_layers(s, usual, softmax_mixture(s, width=s.integer("intermediate_size"))),
        norm=norm,
    )


def flex_olmo(s: Settings) -> LanguageModel:
    """Build FlexOlmo: OLMo 2 with OLMoE's experts."""
    s, norm = s.filled(num_experts=7, num_experts_per_tok=5), rms(s)
    usual = attention(s, qk_norm=QKNorm(norm, Over.ALL_HEADS), rope=s.rope(theta=5e5))
    experts = softmax_mixture(s, width=s.integer("intermediate_size"))
    layers = uniform_layers(s, usual, experts)
    return decoder(s, layers, norm=norm, placement=NormPlacement.POST)


def _clip(s: Settings) -> float | None:
    return s.number("clip_qkv") if s.has("clip_qkv") else None


FAMILIES = (
    Family("flex_olmo", "FlexOlmo", flex_olmo),
    Family("olmo", "OLMo", olmo),
    Family("olmo2", "OLMo 2", olmo2),
    Family("olmo3", "OLMo 3", olmo3),
    Family("olmoe", "OLMoE", olmoe),
)
