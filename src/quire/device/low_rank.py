"""Products of rows by two thin matrices of their own (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import mlx.core as mx
import numpy as np

_GATHERED_ROWS = 64
"""Most rows that are each multiplied by their own matrices; more are multiplied in runs of equal
numbers.
"""


class LowRankOperations:
    """Adds low-rank products to rows, in MLX.

    Attributes:
        gather_mm_dtypes: matrix types for which `mx.gather_mm` gives correct results.
    """

    gather_mm_dtypes: Sequence[mx.Dtype] = (mx.float32, mx.bfloat16, mx.float16)

    def add_low_rank(
        self,
        y: mx.array,
        x: mx.array,
        numbers: mx.array,
        inner: mx.array,
        outer: mx.array,
        runs: Sequence[tuple[int, int, int]] = (),
    ) -> mx.array:
        """Return `y + x @ inner[n].T @ outer[n]`, where `n` is each row's number.

        Args:
            y: `[T, ..., out]`.
            x: `[T, ..., in]`.
            numbers: `[T]` of `Operations.index_type`; 0 stands for zeros.
            inner, outer: `[n, rank, in]` and `[n, rank, out]`.
            runs: `runs_of(numbers)`. Without, numbers are read where rows cannot be gathered.
        """
        gathers = x.ndim == 2 and x.dtype in self.gather_mm_dtypes
        if gathers and (not runs or (len(runs) > 1 and len(x) <= _GATHERED_ROWS)):
            turned = inner.swapaxes(-1, -2)
            low = mx.gather_mm(x[:, None], turned, rhs_indices=numbers)
            return y + mx.gather_mm(low, outer, rhs_indices=numbers)[:, 0]
        parts = [
            (x[start:end] @ inner[number].T) @ outer[number]
            for start, end, number in runs or runs_of(np.array(numbers))
        ]
        return y + (parts[0] if len(parts) == 1 else mx.concatenate(parts))


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int, int]]:
    """Return first row, end and number of each run of rows of one number."""
    runs: list[tuple[int, int, int]] = []
    for number, run in groupby(numbers):
        start = runs[-1][1] if runs else 0
        runs.append((start, start + len(list(run)), int(number)))
    return runs
