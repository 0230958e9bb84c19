"""Tables of the places of patches, stretched to a picture's size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Table:
    """A table of positions for a picture of `side * side` patches, stretched to other pictures.

    Attributes:
        cubic: whether to interpolate by cubic convolution, instead of linearly.
        ends: whether the first and last patch have the first and last position; else the edges of
            table and picture coincide.
        averaged: whether, in a picture with fewer patches, each averages all positions that it
            covers. The cubic convolution then has a = -0.5, as in PyTorch.
        nearest: whether a patch has the one position that its upper left corner lies in.
    """

    side: int
    cubic: bool = False
    ends: bool = True
    averaged: bool = False
    nearest: bool = False

    def taps(
        self, place: npt.NDArray[np.int64], count: int
    ) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
        """Return positions in the table and their weights, along one side of `count` patches."""
        if self.nearest:
            return [(place * self.side // count, np.ones(len(place)))]
        if self.ends:
            at = place * (self.side - 1) / max(count - 1, 1)
        else:
            at = (place + 0.5) * self.side / count - 0.5
        first = np.floor(at).astype(np.int64)
        if self.averaged:
            return self._averaged(at, first, max(self.side / count, 1.0))
        offsets = (-1, 0, 1, 2) if self.cubic else (0, 1)
        share = _cubic_share if self.cubic else _linear_share
        return [
            (np.clip(first + offset, 0, self.side - 1), share(np.abs(at - first - offset)))
            for offset in offsets
        ]

    def matrix(self, count: int) -> npt.NDArray[np.float32]:
        """Return the weights of the table's positions along one side, `[count, side]`."""
        places = np.arange(count)
        weights = np.zeros((count, self.side), np.float32)
        for found, shares in self.taps(places, count):
            np.add.at(weights, (places, found), shares)
        return weights

    def _averaged(
        self, at: npt.NDArray[np.float64], first: npt.NDArray[np.int64], reach: float
    ) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
        """Return weights of positions within the table, stretched `reach` times."""
        most = math.ceil((2 if self.cubic else 1) * reach)
        places = first + np.arange(1 - most, most + 1)[:, None]
        away = np.abs(at - places) / reach
        shares = _cubic_share(away, -0.5) if self.cubic else np.maximum(_linear_share(away), 0)
        shares = np.where((places >= 0) & (places < self.side), shares, 0)
        shares = shares / shares.sum(axis=0)
        return list(zip(np.clip(places, 0, self.side - 1), shares, strict=True))


def _linear_share(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 1 - distance


def _cubic_share(distance: npt.NDArray[np.float64], a: float = -0.75) -> npt.NDArray[np.float64]:
    """Return weights of Keys' cubic convolution; those of distances from 2 on are 0."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = a * (((distance - 5) * distance + 8) * distance - 4)
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
