"""Bidirectional attention of encoders, without a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from quire.device.device import current_device


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
        return current_device().operations.attend_groups(q, k, v, scale=scale).flatten(0, 1)


@dataclass(frozen=True)
class Windows:
    """Groups that are windows of rows anywhere in `parts` equal, consecutive parts of an item.

    Attributes:
        members: for each size of windows, their rows `[parts * windows, size]`.
        places: `[rows]`, the position of each row where a part's windows follow one another.
    """

    members: tuple[mx.array, ...]
    places: mx.array
    parts: int

    @classmethod
    def of(cls, window: npt.NDArray[np.int64], parts: int = 1) -> Self:
        """Return windows from the number of the window of each row of a part."""
        order = np.argsort(window, kind="stable")
        size_of = np.bincount(window)[window[order]]
        members = [order[size_of == size].reshape(-1, size) for size in np.unique(size_of)]
        places = np.argsort(np.concatenate([rows.ravel() for rows in members]))
        first = mx.arange(parts)[:, None] * len(window)  # rows before each part
        within = [(mx.array(rows) + first[..., None]).flatten(0, 1) for rows in members]
        return cls(tuple(within), (mx.array(places) + first).flatten(), parts)

    def attend(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        attend, outs = current_device().operations.attend_groups, list[mx.array]()
        for rows in self.members:
            out = attend(q[rows], k[rows], v[rows], scale=scale)
            outs.append(out.reshape(self.parts, -1, *q.shape[1:]))
        return mx.concatenate(outs, axis=1).flatten(0, 1)[self.places]
