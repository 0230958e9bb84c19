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
            covers.
    """

    side: int
    cubic: bool = False
    ends: bool = True
    averaged: bool = False

    def taps(
        self, place: npt.NDArray[np.int64], count: int
    ) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
        """Return positions in the table and their weights, along one side of `count` patches."""
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

    def _averaged(
        self, at: npt.NDArray[np.float64], first: npt.NDArray[np.int64], reach: float
    ) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
        """Return linear weights of positions up to `reach` away, within the table."""
        most = math.ceil(reach)
        places = first + np.arange(1 - most, most + 1)[:, None]
        shares = np.maximum(_linear_share(np.abs(at - places) / reach), 0)
        shares = np.where((places >= 0) & (places < self.side), shares, 0)
        shares = shares / shares.sum(axis=0)
        return list(zip(np.clip(places, 0, self.side - 1), shares, strict=True))


def _linear_share(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 1 - distance


def _cubic_share(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return weights of Keys' cubic convolution with a = -0.75, as in PyTorch."""
    near = (1.25 * distance - 2.25) * distance**2 + 1
    far = -0.75 * (((distance - 5) * distance + 8) * distance - 4)
    return np.where(distance <= 1, near, far)
