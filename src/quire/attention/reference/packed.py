"""Attention over packed blocks, directly from the codes."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from quire.attention.backend import KeysBeside, Scoring
from quire.attention.reference.cuts import Chunk, DecodeBatch, Tile
from quire.attention.reference.softmax import attention_weights, capped
from quire.cache.formats.base import PackedStore, WrittenBlocks
from quire.device.device import current_device

_Read = tuple[mx.array, Callable[[mx.array], mx.array]]
"""Scores `[..., M, S]` of M query vectors, and the function that turns weights into outputs."""


def decode(
    q: mx.array, store: PackedStore, batch: DecodeBatch, scoring: Scoring, after: list[mx.array]
) -> mx.array:
    """Attend for the rows of sequences with one row each, `[B, heads, head_dim]`, scaled.

    Args:
        after: arrays that are computed before any block is gathered.
    """
    count, heads, _ = q.shape
    kv_heads = batch.kv_heads
    given = q.reshape(count, kv_heads, heads // kv_heads, -1)
    q = store.transform(q).reshape(*given.shape[:3], -1)
    if batch.tails is not None:
        tail = store.tails(mx.depends([batch.tail_heads], after)[0])
        full = batch.full_heads
        full = None if full is None else mx.depends([full], after)[0]
        scores, weighted_sum = _read_with_own(q, store, full, *tail)
        bias = batch.tail_bias
    else:
        reader = store.read(mx.depends([batch.heads], after)[0])
        scores, weighted_sum, bias = reader.scores(q), reader.weighted_sum, batch.bias
    if scoring.chosen is not None:
        bias = bias + batch.chosen_bias(scoring.chosen, tails=store.has_tail)
    if scoring.beside is not None:
        bias = mx.pad(bias, [(0, 0)] * 3 + [(0, scoring.beside.k.shape[2])])
        scores, weighted_sum = _with_beside(
            given, scoring.beside, scores, weighted_sum=weighted_sum
        )
    sinks = None if scoring.sinks is None else scoring.sinks.reshape(kv_heads, -1, 1)
    weights = attention_weights(capped(scores, scoring.softcap), bias, sinks)
    return weighted_sum(weights).reshape(count, heads, -1)


def prefill(
    q: mx.array, store: PackedStore, chunk: Chunk, written: WrittenBlocks | None, scoring: Scoring
) -> mx.array:
    """Attend for a chunk's rows, `[t, heads, head_dim]`, scaled; tile by tile.

    Args:
        written: the chunk's uncoded blocks, in formats with tails.
    """
    q = store.transform(q)
    count, heads, size = q.shape
    kv_heads = chunk.kv_heads
    grouped = q.reshape(count, kv_heads, -1, size).transpose(1, 2, 0, 3)
    sinks = None if scoring.sinks is None else scoring.sinks.reshape(kv_heads, -1, 1, 1)
    by_head = (kv_heads, heads // kv_heads, -1)
    outs: list[mx.array] = []
    for tile in chunk.tiles():
        some = grouped[:, :, tile.rows].reshape(kv_heads, -1, size)
        # Its blocks wait for the tile before, so that one tile's scores and decoded keys are in
        # memory at a time.
        rows = mx.depends([chunk.heads[0, :, tile.blocks]], outs[-1:])[0]
        scores, weighted_sum = _read_tile(
            some, store, rows, chunk=chunk, tile=tile, written=written
        )
        scores = capped(scores.astype(mx.float32), scoring.softcap)
        bias = tile.bias
        if scoring.chosen is not None:
            bias = bias + tile.chosen_bias(scoring.chosen)
        weights = attention_weights(scores.reshape(*by_head, scores.shape[-1]), bias, sinks)
        out = weighted_sum(weights.reshape(kv_heads, -1, weights.shape[-1]))
        outs.append(out.reshape(*by_head, out.shape[-1]))
    # [kv_heads, G, t, value_dim] each
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)
    return out.transpose(2, 0, 1, 3).reshape(count, heads, -1)


def _read_tile(
    q: mx.array,
    store: PackedStore,
    rows: mx.array,
    chunk: Chunk,
    tile: Tile,
    written: WrittenBlocks | None,
) -> _Read:
    """Attend for a tile's queries `[kv_heads, M, -1]` over its blocks, rows `[kv_heads, P]`."""
    if written is None:
        reader = store.read(rows)
        return reader.scores(q), reader.weighted_sum
    before = tile.own - tile.blocks.start
    own = slice(tile.own - chunk.first_own, tile.blocks.stop - chunk.first_own)
    keys, values = _side_by_side(written.keys[own]), _side_by_side(written.values[own])
    return _read_with_own(q, store, rows[:, :before] if before else None, keys=keys, values=values)


def _read_with_own(
    q: mx.array, store: PackedStore, full: mx.array | None, keys: mx.array, values: mx.array
) -> _Read:
    """Attend for queries `[..., M, head_dim]` over full blocks, then uncoded keys.

    Args:
        full: `[..., P]` rows of the full blocks before, if there are any.
        keys, values: of their own block and those after, as written, `[..., tokens, -1]`.
    """
    scores = current_device().times_transposed(q, keys).astype(mx.float32)
    if full is None:
        return scores, lambda weights: weights @ values
    reader = store.read(full)
    tokens = keys.shape[-2]

    def weighted_sum(weights: mx.array) -> mx.array:
        return weights[..., -tokens:] @ values + reader.weighted_sum(weights[..., :-tokens])

    return mx.concatenate([reader.scores(q).astype(mx.float32), scores], axis=-1), weighted_sum


def _with_beside(
    q: mx.array,
    beside: KeysBeside,
    scores: mx.array,
    weighted_sum: Callable[[mx.array], mx.array],
) -> _Read:
    """Attend for scaled queries `[B, kv_heads, G, head_dim]` over keys in no block as well."""
    own = (q @ beside.k.swapaxes(-1, -2).astype(q.dtype)).astype(scores.dtype)
    count = own.shape[-1]

    def both(weights: mx.array) -> mx.array:
        return weighted_sum(weights[..., :-count]) + weights[..., -count:] @ beside.v

    return mx.concatenate([scores, own], axis=-1), both


def _side_by_side(blocks: mx.array) -> mx.array:
    """Convert `[n, kv_heads, block_size, dim]` to `[kv_heads, n * block_size, dim]`."""
    count, kv_heads, _, dim = blocks.shape
    return blocks[0] if count == 1 else blocks.swapaxes(0, 1).reshape(kv_heads, -1, dim)
