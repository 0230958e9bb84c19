"""OLMo 2 (arXiv:2501.00656), OLMo 3 and OLMoE (arXiv:2409.02060)."""

from __future__ import annotations

from dataclasses import replace

from quire.models.attention import Over, QKNorm
from quire.models.base import LanguageModel
from quire.models.description import Mixer, Placement
from quire.models.families.common import (
    Family,
    attention,
    by_type,
    decoder,
    mlp,
    rms,
    softmax_mixture,
    uniform_layers,
)
from quire.models.settings import FULL, SLIDING, Settings


def olmo2(s: Settings) -> LanguageModel:
    norm = rms(s, 1e-5)
    usual = attention(s, qk_norm=QKNorm(norm, Over.ALL_HEADS))
    layers = uniform_layers(s, usual, mlp(s, bias=False))
    return decoder(s, layers, norm=norm, placement=Placement.POST)


def olmo3(s: Settings) -> LanguageModel:
    norm, count = rms(s, 1e-5), s.integer("num_hidden_layers")
    usual = attention(s, qk_norm=QKNorm(norm, Over.ALL_HEADS), rope=None)
    theta = s.positive("rope_theta", default=5e5)
    full, sliding = s.rope_by_type(theta, theta)
    mixers: dict[str, Mixer] = {
        FULL: replace(usual, rope=full),
        SLIDING: replace(usual, rope=sliding, window=s.window(4096)),
    }
    types = s.layer_types([SLIDING if (index + 1) % 4 else FULL for index in range(count)])
    layers = by_type(types, mixers, mlp(s, bias=False))
    return decoder(s, layers, norm=norm, placement=Placement.POST)


def olmoe(s: Settings) -> LanguageModel:
    norm = rms(s, 1e-5)
    clip = s.number("clip_qkv") if s.has("clip_qkv") else None
    usual = attention(s, qk_norm=QKNorm(norm, Over.ALL_HEADS), clip=clip)
    return decoder(
        s,
        uniform_layers(s, usual, softmax_mixture(s, width=s.integer("intermediate_size"))),
        norm=norm,
    )


FAMILIES = (
    Family("olmo2", "OLMo 2", olmo2),
    Family("olmo3", "OLMo 3", olmo3),
    Family("olmoe", "OLMoE", olmoe),
)
