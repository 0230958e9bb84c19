"""Attention in both directions: of an encoder's rows to each other, without a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np

from quire.core.arrays import Ints
from quire.device.device import current_device
from quire.device.dtypes import from_host

_FINE, _EIGHTHS = 32, 8
"""Lengths are rounded up to multiples of 32, and longer ones to eighths of a power of two."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Sequences of a step that are computed together.

    Attributes:
        rows: `[sequences, length]`, the step's rows; shorter sequences are filled with their last
            row. None if the batch is all of the step's rows in order.
        count: number of sequences.
        lengths: `[sequences]`; None if all have the batch's length.
    """

    rows: mx.array | None
    count: int
    lengths: mx.array | None

    def of(self, x: mx.array) -> mx.array:
        """Return rows `[T, heads, dim]` as `[sequences, length, heads, dim]`."""
        if self.rows is None:
            return x.reshape(self.count, -1, *x.shape[1:])
        return x[self.rows]


class BidirectionalRows:
    """The rows of a step's sequences, each of which is computed whole.

    Sequences of similar length form a batch. The length that they are filled up to follows from a
    sequence's own length, so its bits do not depend on its neighbours.

    Args:
        counts: number of rows of each sequence, in the order of the step's rows.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        starts = [0, *accumulate(counts)]
        classes: dict[int, list[int]] = {}
        for number, count in enumerate(counts):
            classes.setdefault(_rounded(count), []).append(number)
        self._places: mx.array | None = None
        self._batches: list[_Batch] = []
        if len(set(counts)) == 1 and counts[0] in classes:
            self._batches.append(_Batch(rows=None, count=len(counts), lengths=None))
            return
        places = np.zeros(starts[-1], np.int32)
        first = 0
        for length, numbers in classes.items():
            own = [counts[number] for number in numbers]
            rows = np.array([starts[number] for number in numbers], np.int32)[:, None]
            within = np.arange(length, dtype=np.int32)
            lengths: Ints = np.array(own, np.int32)
            for place, number in enumerate(numbers):
                begin = first + place * length
                places[starts[number] : starts[number + 1]] = np.arange(
                    begin, begin + counts[number]
                )
            first += len(numbers) * length
            filled = rows + np.minimum(within, lengths[:, None] - 1)
            self._batches.append(_Batch(from_host(filled), len(numbers), from_host(lengths)))
        self._places = from_host(places)

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, scale: float, reach: int | None
    ) -> mx.array:
        """Attend for rows `[T, heads, head_dim]`; for arguments see `Operations.attend_groups`."""
        attend, outs = current_device().operations.attend_groups, list[mx.array]()
        for batch in self._batches:
            own = batch.of(q), batch.of(k), batch.of(v)
            out = attend(*own, scale=scale, reach=reach, lengths=batch.lengths)
            outs.append(out.flatten(0, 1))
        if self._places is None:
            return outs[0]
        joined = outs[0] if len(outs) == 1 else mx.concatenate(outs)
        return joined[self._places]


def _rounded(length: int) -> int:
    """Return the length of the batch of a sequence."""
    step = max(_FINE, (1 << (length - 1).bit_length()) // _EIGHTHS) if length > 1 else _FINE
    return -(-length // step) * step
