"""Bidirectional attention of encoders, without a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from quire.device.bidirectional import attend


class Neighbours(Protocol):
    """Groups of an item's rows that see each other."""

    def attend(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        """Attend within groups: q is `[rows, heads, head_dim]`, k and v may have fewer heads. The
        result has q's shape.
        """
        ...


@dataclass(frozen=True)
class Parts:
    """Groups that are `count` equal, consecutive parts of an item."""

    count: int

    def attend(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        q, k, v = (x.reshape(self.count, -1, *x.shape[1:]) for x in (q, k, v))
        return attend(q, k, v, scale=scale).flatten(0, 1)


@dataclass(frozen=True)
class Windows:
    """Groups that are windows of rows anywhere in an item.

    Attributes:
        members: for each size of windows, their rows `[windows, size]`.
        places: `[rows]`, the position of each row in the concatenated `members`.
    """

    members: tuple[mx.array, ...]
    places: mx.array

    @classmethod
    def of(cls, window: npt.NDArray[np.int64]) -> Self:
        """Return windows from the number of each row's window, `[rows]`."""
        order = np.argsort(window, kind="stable")
        size_of = np.bincount(window)[window[order]]
        members = [order[size_of == size].reshape(-1, size) for size in np.unique(size_of)]
        places = np.argsort(np.concatenate([rows.ravel() for rows in members]))
        return cls(tuple(mx.array(rows) for rows in members), mx.array(places))

    def attend(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        parts = [
            attend(q[rows], k[rows], v[rows], scale=scale).flatten(0, 1) for rows in self.members
        ]
        return mx.concatenate(parts)[self.places]
