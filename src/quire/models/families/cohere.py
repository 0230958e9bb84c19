"""Command R, R+ and R7B, Aya (Cohere)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.attention import Attention, Over, QKNorm
from quire.models.base import LanguageModel
from quire.models.description import Layer, Mixer, Norm, Placement
from quire.models.families.common import Family, attention, by_type, decoder, mlp, uniform_layers
from quire.models.settings import FULL, SLIDING, Settings


def cohere(s: Settings) -> LanguageModel:
    norm = QKNorm(_norm(s), Over.EACH_HEAD) if s.flag("use_qk_norm", default=False) else None
    return _decoder(
        s, uniform_layers(s, replace(_attention(s, 5e5), qk_norm=norm), mlp(s, bias=False))
    )


def cohere2(s: Settings) -> LanguageModel:
    """Sliding layers rotate, full ones know no order."""
    usual, every = _attention(s, 1e4), s.integer("sliding_window_pattern", default=4)
    mixers: dict[str, Mixer] = {
        FULL: replace(usual, rope=None),
        SLIDING: replace(usual, window=s.window(4096)),
    }
    count = s.integer("num_hidden_layers")
    types = s.layer_types([SLIDING if (index + 1) % every else FULL for index in range(count)])
    return _decoder(s, by_type(types, mixers, mlp(s, bias=False)))


def _attention(s: Settings, theta: float) -> Attention:
    return attention(s, rope=replace(s.rope(theta=theta), interleaved=True))


def _norm(s: Settings) -> Norm:
    return Norm(s.number("layer_norm_eps", default=1e-5, minimum=0.0), centred=True)


def _decoder(s: Settings, layers: tuple[Layer, ...]) -> LanguageModel:
    changes: dict[str, Any] = {
        "norm": _norm(s),
        "placement": Placement.PARALLEL,
        "head_multiplier": s.number("logit_scale", default=0.0625),
    }
    return decoder(s, layers, tied=True, **changes)


FAMILIES = (
    Family("cohere", "Command R, R+, Aya", cohere),
    Family("cohere2", "Command R7B, Command A", cohere2),
)
