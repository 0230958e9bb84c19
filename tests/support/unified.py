"""Gemma 4 12B in small: 2 x 2 patches of 4 x 4 pixels are a soft token, 20 samples a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.core.media import MediaItem
from tests.support.families import CONFIGS
from tests.support.tiny_models import gemma4_vision_config

SAMPLES = 20


def unified_config(**text: Any) -> dict[str, Any]:
    """Return a small configuration of Gemma 4 12B; `changes` are of the text part."""
    whole = gemma4_vision_config(CONFIGS["gemma4_unified_text"] | text)
    return whole | {
        "model_type": "gemma4_unified",
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 48,
            "output_proj_dims": 48,
            "mm_posemb_size": 12,
        },
        "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": SAMPLES},
    }


def wave(rows: int, seed: int = 0) -> MediaItem:
    """Return a random sound, so many pieces long."""
    rng = np.random.default_rng(seed)
    features = rng.normal(0.0, 0.2, (rows, SAMPLES)).astype(np.float32)
    return MediaItem.of("audio", features.tobytes(), features.shape, rows, bidirectional=False)
