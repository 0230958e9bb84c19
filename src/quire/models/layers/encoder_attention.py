"""Attention of encoders, in which rows see each other in both directions and nothing is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from quire.device.device import current_device

_SCORE_BYTES = 16 << 20  # of attention's scores at once, where MLX writes them out


def attend(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """Return all rows of a group over all rows of it; where MLX writes scores out, in tiles.

    Args:
        q: `[groups, rows, heads, head_dim]`.
        k, v: the same, or with fewer heads.
        scale: multiplies the logits.

    Returns:
        As `q`.
    """
    groups, n, heads, _ = q.shape
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    tile = max(1, _SCORE_BYTES // (groups * heads * n * 4)) if not current_device().fuses else n
    parts: list[mx.array] = []
    for start in range(0, n, tile):
        # Each waits for the one before, so that one tile's scores are in memory at a time.
        rows = mx.depends([q[:, :, start : start + tile]], parts[-1:])[0]
        parts.append(mx.fast.scaled_dot_product_attention(rows, k, v, scale=scale))
    return mx.concatenate(parts, axis=2).swapaxes(1, 2)


class Neighbours(Protocol):
    """The rows of an item that see each other."""

    def attend(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        """`[rows, heads, head_dim]`, of keys and values with fewer heads -> as `q`."""
        ...


@dataclass(frozen=True)
class Parts:
    """Rows see those of their own part; an item is made of so many equal ones, in order."""

    count: int

    def attend(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        q, k, v = (x.reshape(self.count, -1, *x.shape[1:]) for x in (q, k, v))
        return attend(q, k, v, scale).flatten(0, 1)


@dataclass(frozen=True)
class Windows:
    """Rows see those of their own window, wherever those are.

    Attributes:
        members: rows of windows of one size, `[windows, size]`, for each size that there is.
        places: where each row is among all of `members`, `[rows]`.
    """

    members: tuple[mx.array, ...]
    places: mx.array

    @classmethod
    def of(cls, window: npt.NDArray[np.int64]) -> Self:
        """From the number of each row's window, `[rows]`."""
        order = np.argsort(window, kind="stable")
        size_of = np.bincount(window)[window[order]]
        members = [order[size_of == size].reshape(-1, size) for size in np.unique(size_of)]
        places = np.argsort(np.concatenate([rows.ravel() for rows in members]))
        return cls(tuple(mx.array(rows) for rows in members), mx.array(places))

    def attend(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        parts = [attend(q[rows], k[rows], v[rows], scale).flatten(0, 1) for rows in self.members]
        return mx.concatenate(parts)[self.places]
