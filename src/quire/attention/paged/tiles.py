"""Divides a step's rows into tiles for the paged kernels. Tiles depend on rows, not on key
counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import mlx.core as mx
import numpy as np

from quire.attention.metadata import AttentionMetadata
from quire.core.arrays import Ints
from quire.device.gpu_kernels import in_device_memory

FEW_ROWS = 8
"""Most rows of a sequence that does not count as a prompt."""

TILE_FIELDS = 6
"""Fields of a tile: first row, rows, lowest key, one past the highest key, index of block 0 in the
table, and the sequence."""


@dataclass(frozen=True, slots=True)
class Part:
    """Adjacent sequences whose rows one launch handles.

    Attributes:
        rows: their range among the metadata's rows.
        few: whether each sequence has few rows, so that its keys are split over thread blocks.
        tiles: `[n, TILE_FIELDS]`; rows are numbered from the part's first.
        visible: `[T, 2]` the first and last key that each row sees.
    """

    rows: slice
    few: bool
    tiles: Ints
    visible: Ints


def cut(
    metadata: AttentionMetadata, few_rows: int | Ints, rows_few: int, rows_many: int
) -> Iterator[Part]:
    """Return the parts of a step, in the order of its rows.

    Args:
        few_rows: the most rows of a sequence that counts as one of few rows, one number or `[S]`.
        rows_few, rows_many: rows of one sequence that a tile holds, of either kind of sequence.
    """
    few = metadata.counts <= few_rows
    changes = (np.flatnonzero(few[1:] != few[:-1]) + 1).tolist()
    bounds = [0, *changes, metadata.sequences]
    for start, end in pairwise(bounds):
        yield _part(
            metadata, start, end, few=bool(few[start]), rows=rows_few if few[start] else rows_many
        )


def _part(metadata: AttentionMetadata, start: int, end: int, few: bool, rows: int) -> Part:
    """Return sequences `[start, end)`, in tiles of so many rows."""
    starts = metadata.query_starts
    first = int(starts[start])
    counts = metadata.counts[start:end]
    each = -(-counts // rows)  # tiles of each sequence
    owner = np.repeat(np.arange(start, end), each)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(each) - each, each)
    row = starts[owner] + number * rows
    count = np.minimum(rows, starts[owner + 1] - row)
    span = slice(first, int(starts[end]))
    visible = np.stack([metadata.first_visible[span], metadata.last_visible[span]], axis=1)
    tiles = np.empty((len(owner), TILE_FIELDS), np.int32)
    tiles[:, 0] = row - first
    tiles[:, 1] = count
    tiles[:, 2] = np.minimum.reduceat(visible[:, 0], row - first)
    tiles[:, 3] = np.maximum.reduceat(visible[:, 1], row - first) + 1
    tiles[:, 4] = metadata.table_starts[owner] - metadata.first_blocks[owner]
    tiles[:, 5] = owner
    return Part(span, few, tiles, visible=visible)


@cache
def score_numbers(scale: float, softcap: float | None) -> mx.array:
    """Return a scale and a cap of scores for weights powers of two, first of its elements."""
    both = [scale * math.log2(math.e), (softcap or 0.0) * math.log2(math.e)]
    return in_device_memory(mx.array(both))
