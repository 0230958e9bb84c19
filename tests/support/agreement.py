"""Agreement of a model that sees or hears with its reference."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np


def differ(ours: mx.array, theirs: Any) -> float:
    """Return the largest difference, relative to the largest of their values.

    Args:
        theirs: an array of any library in the host's memory, of the same shape.
    """
    found, wanted = np.array(ours), np.asarray(theirs, np.float32)
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())
