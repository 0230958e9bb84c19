"""Sums and columns of several ranks, as models compute them."""

from __future__ import annotations

import mlx.core as mx

from quire.device.device import current_device
from quire.device.ranks import Part


def summed(x: mx.array, part: Part) -> mx.array:
    """Return the sum of the ranks' arrays, the same bits on each; `x` if one rank is the whole."""
    return x if part.size == 1 else current_device().operations.summed(x, part)


def gathered(x: mx.array, part: Part) -> mx.array:
    """Concatenate the ranks' columns: `[R, own columns]` -> `[R, all columns]`, the same bits on
    each rank.
    """
    return x if part.size == 1 else current_device().operations.gathered(x, part)
