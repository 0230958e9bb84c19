"""EXAONE 4.0 (arXiv:2507.11407)."""

from __future__ import annotations

from dataclasses import replace

from quire.models.attention import QKNorm
from quire.models.base import LanguageModel
from quire.models.description import Mixer, Placement
from quire.models.families.common import Family, attention, by_type, decoder, mlp, rms
from quire.models.settings import FULL, SLIDING, Settings


def exaone4(s: Settings) -> LanguageModel:
    """Where there is a window, only sliding layers rotate."""
    norm, window = rms(s, 1e-5), s.window(4096)
    usual = attention(s, qk_norm=QKNorm(norm), qkv_bias=False, out_bias=False)
    mixers: dict[str, Mixer] = {
        FULL: usual if window is None else replace(usual, rope=None),
        SLIDING: replace(usual, window=window),
    }
    layers = by_type(s.layer_types(_types(s, window)), mixers, mlp(s, bias=False))
    return decoder(s, layers, norm=norm, placement=Placement.POST)


def _types(s: Settings, window: int | None) -> list[str]:
    """By a pattern that is a number (every so many is full) or letters (L is sliding, G full)."""
    count, pattern = s.integer("num_hidden_layers"), s.values.get("sliding_window_pattern", 4)
    if window is None or not pattern:
        return [FULL] * count
    if isinstance(pattern, str):
        types = [
            SLIDING if pattern[index % len(pattern)] == "L" else FULL for index in range(count)
        ]
        return [*types[:-1], FULL]
    every = s.integer("sliding_window_pattern", default=4)
    return [SLIDING if (index + 1) % every else FULL for index in range(count)]


FAMILIES = (Family("exaone4", "EXAONE 4.0", exaone4),)
