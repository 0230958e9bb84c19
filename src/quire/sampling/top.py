"""The best tokens of a row without sorting the whole vocabulary."""

from __future__ import annotations

import math

import mlx.core as mx

from quire.device.device import current_device

BLOCK = 128
"""Tokens per block. A row's best k tokens lie in the k blocks with the largest maxima, so only k *
BLOCK candidates are sorted.
"""


def blocks_of(rows: mx.array, fill: float) -> mx.array:
    """Cut `[R, V]` into `[R, B, BLOCK]`, padding the last block with `fill`."""
    count, vocab = rows.shape
    if missing := -vocab % BLOCK:
        rows = mx.pad(rows, [(0, 0), (0, missing)], constant_values=fill)
    return rows.reshape(count, -1, BLOCK)


def top(logits: mx.array, n: int) -> tuple[mx.array, mx.array]:
    """Return the n largest logits of each row, best first, ties by id.

    Which of several equal logits is the n-th depends on the row and n only. If fewer than n logits
    exceed -inf, the rest are ids of the vocabulary with -inf, perhaps repeated.

    Args:
        logits: float32 [R, V].
        n: at most V.

    Returns:
        ids int32 [R, n] and values float32 [R, n].
    """
    vocab, of_rows = logits.shape[1], current_device().operations.of_rows
    if n == vocab:
        ids = mx.argsort(-logits, axis=-1).astype(mx.int32)
        return ids, of_rows(logits, ids)
    if n * BLOCK < vocab:
        blocks = blocks_of(logits, -math.inf)  # [R, B, BLOCK]
        chosen = _largest(blocks.max(axis=-1), n)  # [R, n]
        ids = (chosen[..., None] * BLOCK + mx.arange(BLOCK)).flatten(1)
        candidates = of_rows(blocks, chosen).flatten(1)
        ids = of_rows(ids, _largest(candidates, n))
    else:
        ids = _largest(logits, n)
    ids = mx.sort(ids, axis=-1)
    real = mx.minimum(ids, vocab - 1)  # blocks are filled up with tokens that don't exist
    values = mx.where(ids == real, of_rows(logits, real), -math.inf)
    order = mx.argsort(-values, axis=-1)  # stable: equals stay sorted by id
    return of_rows(real, order), of_rows(values, order)


def _largest(values: mx.array, n: int) -> mx.array:
    """Return the indices of the n largest values of each row, in any order; int32 `[R, n]`."""
    return mx.argpartition(-values, n - 1, axis=-1)[:, :n].astype(mx.int32)
