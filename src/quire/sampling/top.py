"""The best tokens of a row without sorting the whole vocabulary."""

from __future__ import annotations

import math

import mlx.core as mx

BLOCK = 128
"""Tokens a block. The best k of a row lie in the k blocks with the best maxima, so k * BLOCK
candidates are sorted instead of the vocabulary."""


def blocks_of(rows: mx.array, fill: float) -> mx.array:
    """[R, V] cut into [R, B, BLOCK], the last block filled up with `fill`."""
    count, vocab = rows.shape
    if missing := -vocab % BLOCK:
        rows = mx.pad(rows, [(0, 0), (0, missing)], constant_values=fill)
    return rows.reshape(count, -1, BLOCK)


def top_k(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest logits of each row, best first, equals by id.

    Args:
        logits: float32 [R, V].
        k: at most V.

    Returns:
        ids int32 [R, k] and values float32 [R, k].
    """
    blocks = blocks_of(logits, -math.inf)  # [R, B, BLOCK]
    if k < blocks.shape[1]:
        # Blocks in the order of their tokens, so that a stable sort settles ties by id.
        chosen = mx.sort(mx.argsort(-blocks.max(axis=-1), axis=-1)[:, :k], axis=-1)  # [R, k]
        blocks = mx.take_along_axis(blocks, chosen[..., None], axis=1)
        ids = chosen[..., None] * BLOCK + mx.arange(BLOCK, dtype=chosen.dtype)
    else:
        ids = mx.arange(blocks.shape[1] * BLOCK, dtype=mx.uint32)[None]
        ids = mx.broadcast_to(ids, (logits.shape[0], ids.shape[1]))
    candidates = blocks.flatten(1)
    order = mx.argsort(-candidates, axis=-1)[:, :k]
    ids = mx.take_along_axis(ids.reshape(candidates.shape), order, axis=-1)
    return ids.astype(mx.int32), mx.take_along_axis(candidates, order, axis=-1)
