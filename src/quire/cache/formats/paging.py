"""Operations on arrays whose first axis is `pages * rows_a_page`. Formats build on these."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from quire.cache.view import Ints


def page_rows(pages: Ints, rows: int) -> mx.array:
    """Page ids `[n]` to array rows `[n * rows]`."""
    return mx.array((pages[:, None] * rows + np.arange(rows, dtype=np.int32)).reshape(-1))


def resized(
    array: mx.array, rows: int, capacity: int, moves: tuple[tuple[int, int], ...]
) -> mx.array:
    """The array with pages moved (from id, to id) and then cut or extended to `capacity` pages."""
    if moves:
        pairs = np.array(moves, dtype=np.int32)
        array[page_rows(pairs[:, 1], rows)] = array[page_rows(pairs[:, 0], rows)]
    have = array.shape[0]
    if capacity * rows < have:
        return mx.contiguous(array[: capacity * rows])
    # Zeros, not garbage: a masked key still enters 0 * value, and 0 * NaN is NaN.
    more = mx.zeros((capacity * rows - have, *array.shape[1:]), dtype=array.dtype)
    return mx.concatenate([array, more])
