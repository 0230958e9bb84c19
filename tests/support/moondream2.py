"""A small Moondream 2: Moondream 3 without experts and learned temperatures."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from tests.support import moondream
from tests.support.moondream import PROMPTS, published
from tests.support.tiny_models import random_weights

__all__ = ["CONFIG", "CONVERTED", "PROMPTS", "converted", "published", "weights"]

_TEXT = {key: each for key, each in moondream.TEXT.items() if key != "moe"}
CONFIG: dict[str, Any] = {
    "model_type": "moondream1",
    "config": {"text": _TEXT, "vision": moondream.VISION},
}
_CONVERTED = moondream.CONVERTED["text_config"]
CONVERTED: dict[str, Any] = {
    "model_type": "moondream2",
    "text_config": {
        key: each
        for key, each in _CONVERTED.items()
        if "moe" not in key and "experts" not in key and key not in ("head_dim", "rope_dim")
    },
    "vision_config": moondream.CONVERTED["vision_config"],
}
"""The configuration as mlx-vlm writes it."""


def weights() -> dict[str, mx.array]:
    """Return random weights by this package's names."""
    return {
        name: array - 1.0 if name.endswith(".bias") else array
        for name, array in random_weights(CONFIG).items()
    }


def converted(theirs: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return what a publisher's tensors are in a conversion by mlx-vlm."""
    ready = {}
    for key, array in moondream.converted(theirs).items():
        key = key.replace("text.model.wte.", "text.model.embed_tokens.")
        ready[key.replace("text.model.blocks.", "text.model.layers.")] = array
    return ready
