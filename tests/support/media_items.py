"""Items for the encoders of small configurations: a shape that each takes, and random features."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from quire.core.errors import RequestError
from quire.models.base import LanguageModel, MediaEncoder
from quire.models.registry import build
from tests.support.registered import CONFIGS as REGISTERED
from tests.support.tiny_models import gemma4_audio_config, gemma4_vision_config

CONFIGS: dict[str, dict[str, Any]] = {
    **REGISTERED,
    "gemma4, pictures": gemma4_vision_config(),
    "gemma4, sounds": gemma4_audio_config(),
}

_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "QwenVideoEncoder": ((2, 4, 8, 500_000),),
    "QwenVideoAudioEncoder": ((2, 4, 8, 500_000, 40, 16),),
    "TileEncoder": ((1, 2, 2, 4, 2, 3), (3,), (2, 2)),
    "HybridEncoder": ((1,),),
    "OcrEncoder": ((1, 2),),
    "LlamaPictureEncoder": ((1, 2),),
    "Gemma3nVisionEncoder": ((64, 64),),
    "QwenSoundEncoder": ((40, 16),),
    "Gemma3nAudioEncoder": ((40, 16),),
    "Gemma4AudioEncoder": ((40, 16),),
    "WhisperSoundEncoder": ((3000, 80),),
    "WaveEncoder": ((3, 20),),
}
"""Shapes to try, by the encoder's class; others take a picture of 4 by 8 patches."""


@cache
def encoders() -> dict[tuple[str, str], type]:
    """Return the class of every encoder of `CONFIGS`, by the configuration's name and media kind.

    Kept, since modules build all models for it when they are collected.
    """
    return {
        (name, kind): type(encoder)
        for name, config in CONFIGS.items()
        for kind, encoder in build(config).encoders.items()
    }


def shape_for(encoder: MediaEncoder) -> tuple[int, ...]:
    """Return a small shape that an encoder takes."""
    for shape in _SHAPES.get(type(encoder).__name__, ((4, 8),)):
        try:
            encoder.rows(shape)
        except (RequestError, ValueError):  # the latter: too many or too few numbers
            continue
        return shape
    raise AssertionError(f"no shape for {type(encoder).__name__}")


def random_features(
    model: LanguageModel, kind: str, shape: tuple[int, ...], items: int = 1
) -> mx.array:
    """Return features of items of one shape, uint8 `[items * feature_bytes]`."""
    size = items * model.encoders[kind].feature_bytes(shape)
    random = np.random.default_rng(items)
    if kind != "audio":
        return mx.array(random.integers(0, 64, size, np.uint8))  # as floats, of sound, below 1
    return mx.array(random.standard_normal(size // 4, np.float32).view(np.uint8))
