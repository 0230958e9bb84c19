"""Operations on arrays whose first axis is `blocks * rows_a_block`, shared by formats."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from quire.core.arrays import Ints


def block_rows(blocks: Ints, rows: int) -> mx.array:
    """Convert block ids `[n]` to array rows `[n * rows]`."""
    return mx.array((blocks[:, None] * rows + np.arange(rows, dtype=np.int32)).reshape(-1))


def gathered(arrays: list[mx.array], rows: mx.array) -> list[mx.array]:
    """Gather rows `[..., P]` of `[rows, block_size, -]` to `[..., P * block_size, -]`."""
    tokens = arrays[0].shape[1]
    shape = (*rows.shape[:-1], rows.shape[-1] * tokens)
    return [array[rows].reshape(*shape, array.shape[-1]) for array in arrays]


def resized(
    array: mx.array, rows: int, capacity: int, moves: tuple[tuple[int, int], ...]
) -> mx.array:
    """Move blocks of an array (from id, to id), then cut or extend it to `capacity` blocks."""
    if moves:
        pairs = np.array(moves, dtype=np.int32)
        array[block_rows(pairs[:, 1], rows)] = array[block_rows(pairs[:, 0], rows)]
    have = array.shape[0]
    if capacity * rows < have:
        return mx.contiguous(array[: capacity * rows])
    # Zeros, not garbage: a masked key still enters 0 * value, and 0 * NaN is NaN.
    larger = mx.zeros((capacity * rows, *array.shape[1:]), dtype=array.dtype)
    larger[:have] = array  # in place: a third array, of zeros alone, would take memory, too
    return larger
