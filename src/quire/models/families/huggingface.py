"""SmolLM3."""

from __future__ import annotations

from dataclasses import replace

from quire.core.errors import ModelError
from quire.models.base import LanguageModel
from quire.models.description import Layer
from quire.models.families.common import Family, attention, decoder, mlp
from quire.models.settings import FULL, SLIDING, Settings


def smollm3(s: Settings) -> LanguageModel:
    """Build SmolLM3, in which every fourth layer has no positions (arXiv:2501.18795)."""
    usual, block = attention(s, rope=s.rope(theta=2e6)), mlp(s)
    count, every = s.integer("num_hidden_layers"), s.integer("no_rope_layer_interval", default=4)
    rotated = s.integers("no_rope_layers") or [(index + 1) % every for index in range(count)]
    if len(rotated) != count:
        raise ModelError(f"config.json: {len(rotated)} no_rope_layers for {count} layers")
    window = s.window() if s.flag("use_sliding_window", default=False) else None
    kinds = [SLIDING if window and not each else FULL for each in rotated]
    layers = tuple(
        Layer(
            (
                replace(
                    usual,
                    rope=usual.rope if rotates else None,
                    window=window if kind == SLIDING else None,
                ),
            ),
            block,
        )
        for rotates, kind in zip(rotated, s.layer_types(kinds), strict=True)
    )
    return decoder(s, layers, tied=True)


FAMILIES = (Family("smollm3", "SmolLM3", smollm3),)
