"""Pictures that tests show to processors and encoders."""

from __future__ import annotations

import numpy as np
import PIL.Image

SIZES = {"small": (20, 90), "usual": (333, 200), "large": (700, 1500), "narrow": (1500, 30)}
"""Width and height."""


def photograph(size: tuple[int, int]) -> PIL.Image.Image:
    """Return a slope of colours with some noise."""
    width, height = size
    rng = np.random.default_rng(width)
    slope = np.linspace(0, 200, width)[None, :, None] * np.linspace(0.2, 1, height)[:, None, None]
    pixels = slope + rng.integers(0, 50, (height, width, 3))
    return PIL.Image.fromarray(pixels.astype(np.uint8))


def random_patches(seed: int, count: int, side: int) -> bytes:
    """uint8 `[count, side * side, 3]`: each patch has random colours around one of its own."""
    rng = np.random.default_rng(seed)
    tone = rng.integers(0, 200, (count, 1, 3))
    pixels = tone + rng.integers(0, 56, (count, side**2, 3))
    return pixels.astype(np.uint8).tobytes()
