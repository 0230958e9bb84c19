"""Rows of a step that come from a media encoder, in the form in which models take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Rows of a step whose embeddings come from a media encoder.

    Attributes:
        placed: bool `[T, 1]`, which of the step's rows these are.
        levels: `[T, hidden]` each, whatever they hold of other rows: embeddings, and further levels
            of encoders that have them. The second is added to the output of the decoder's first
            layer, and so on.
    """

    placed: mx.array
    levels: tuple[mx.array, ...]

    @classmethod
    def of(
        cls, items: Sequence[tuple[npt.NDArray[np.int32], tuple[mx.array, ...]]], rows: int
    ) -> MediaRows:
        """Combine each item's row indices with its encoder's outputs, level by level.

        Args:
            rows: number of the step's rows.
        """
        placed = np.zeros((rows, 1), bool)
        for own, _ in items:
            placed[own] = True
        levels = range(max(len(made) for _, made in items))
        return cls(mx.array(placed), tuple(_by_row(items, level, rows) for level in levels))

    def replaced(self, embeddings: mx.array) -> mx.array:
        """Replace the embeddings of these rows by the encoder's, `[T, hidden]`."""
        return mx.where(self.placed, self.levels[0].astype(embeddings.dtype), embeddings)

    def deepened(self, hidden: mx.array, layer: int) -> mx.array:
        """Add the encoder's level for this layer to the layer's output, `[T, hidden]`."""
        if layer + 1 >= len(self.levels):
            return hidden
        added = self.levels[layer + 1].astype(hidden.dtype)
        return hidden + mx.where(self.placed, added, mx.zeros((), hidden.dtype))


def _by_row(
    items: Sequence[tuple[npt.NDArray[np.int32], tuple[mx.array, ...]]], level: int, rows: int
) -> mx.array:
    """Return a level's rows in the order of the step's, `[rows, hidden]`.

    Rows of items that lack the level are zero; rows of no item are those of any.
    """
    source = np.zeros(rows, np.int32)
    parts: list[mx.array] = []
    count = 0
    for own, made in items:
        if level < len(made):
            source[own] = np.arange(count, count + len(own))
            parts.append(made[level])
            count += len(own)
        else:
            source[own] = -1
    parts += [mx.zeros((1, parts[0].shape[1]), parts[0].dtype)] * bool((source < 0).any())
    source[source < 0] = count
    return mx.concatenate(parts)[mx.array(source)]
