"""Attention over plain blocks: MLX's fused attention if there is one, else single operations."""

from __future__ import annotations

import math

import mlx.core as mx

from quire.attention.backend import Scoring
from quire.attention.reference.cuts import Chunk, DecodeBatch, KeyPlaces, RowKeys
from quire.attention.reference.softmax import attention_weights, capped
from quire.cache.formats.base import LayerStore
from quire.device.device import current_device

SCORES = 32 << 20
"""Most attention scores (heads * rows * keys) of a chunk."""


def decode(q: mx.array, store: LayerStore, batch: DecodeBatch, scoring: Scoring) -> mx.array:
    """Attend for the rows of sequences with one row each, `[B, heads, head_dim]`."""
    count, kv_heads, blocks = batch.heads.shape
    shape = (count, kv_heads, blocks * batch.block_size, -1)
    read = [each[batch.heads].reshape(shape).astype(q.dtype) for each in store.arrays()]
    return _single_rows(q, *_keys_and_values(store, read), batch, scoring)


def chosen(
    q: mx.array, store: LayerStore, places: KeyPlaces, scoring: Scoring, keys: mx.array
) -> mx.array:
    """Attend for rows `[T, heads, head_dim]` that each see keys `[T, K]`, gathered tile by tile."""
    count, size = keys.shape
    tile = max(1, SCORES // (size * store.shape.head_dim))
    outs: list[mx.array] = []
    for start in range(0, count, tile):
        rows = slice(start, min(start + tile, count))
        some = mx.depends([keys[rows]], outs[-1:])[0]
        at = places.find(rows, mx.maximum(some, 0))
        read = [each[at][:, None].astype(q.dtype) for each in store.arrays()]  # [t, 1, K, dim]
        k, v = _keys_and_values(store, read)
        outs.append(_single_rows(q[rows], k, v, RowKeys(some >= 0), scoring))
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)


def _single_rows(
    q: mx.array, k: mx.array, v: mx.array, batch: DecodeBatch | RowKeys, scoring: Scoring
) -> mx.array:
    """Attend for q `[B, heads, head_dim]` over k and v `[B, kv_heads, S, dim]`."""
    if _spells_out(scoring):
        return _decode_spelled_out(_scaled(q, scoring.scale), k, v, batch, scoring)
    out = mx.fast.scaled_dot_product_attention(
        q[:, :, None],  # [B, heads, 1, head_dim]
        k,
        v,
        scale=scoring.scale,
        mask=batch.mask,
        sinks=scoring.sinks,
    )
    return out[:, :, 0]


def prefill(q: mx.array, store: LayerStore, chunk: Chunk, scoring: Scoring) -> mx.array:
    """Attend for a chunk's rows, `[t, heads, head_dim]`, in tiles whose scores are bounded.

    With the compiled CPU kernels, rows get the same bits as in `decode`: whole blocks are read, and
    softmax is the same.
    """
    arrays = store.arrays()
    alike = current_device().kernels is not None
    narrow = alike or arrays[0].dtype != mx.float32 or q.dtype != mx.float32
    count, size = q.shape[0], chunk.block_size if alike else 1
    seen = _whole(int(chunk.last[-1]) + 1, size)
    k, v = _keys_and_values(
        store, [_gathered(each, chunk)[:, :, :seen].astype(q.dtype) for each in arrays]
    )
    q = q.swapaxes(0, 1)[None]  # [1, heads, t, head_dim]
    tile = max(1, SCORES // (q.shape[1] * seen))
    outs = []
    for start in range(0, count, tile):
        rows = slice(start, min(start + tile, count))
        # The rows of a causal tile see nothing behind their own last key.
        end = _whole(int(chunk.last[rows.stop - 1]) + 1, size) if chunk.causal else seen
        some = q[:, :, rows], k[:, :, :end], v[:, :, :end]
        if _spells_out(scoring):
            outs.append(_chunk_spelled_out(*some, chunk, rows, scoring, narrow=narrow))
            continue
        mask = "causal" if chunk.causal else chunk.mask[rows]
        out = mx.fast.scaled_dot_product_attention(
            *some, scale=scoring.scale, mask=mask, sinks=scoring.sinks
        )
        outs.append(out)
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)
    return out.squeeze(0).swapaxes(0, 1)  # [t, heads, value_dim]


def _whole(keys: int, size: int) -> int:
    """Round a number of keys up to whole blocks of `size`."""
    return -(-keys // size) * size


def _keys_and_values(store: LayerStore, read: list[mx.array]) -> tuple[mx.array, mx.array]:
    """Split arrays read from a store into keys `[..., head_dim]` and values `[..., value_dim]`."""
    keys, *values = read
    return keys, values[0] if values else keys[..., : store.shape.value_dim]


def _gathered(blocks: mx.array, chunk: Chunk) -> mx.array:
    """Gather blocks to `[1, kv_heads, P * block_size, dim]`."""
    return blocks[chunk.heads].reshape(1, chunk.kv_heads, -1, blocks.shape[-1])


def _spells_out(scoring: Scoring) -> bool:
    """Return whether single operations replace MLX's fused attention.

    On a CPU there is none, and MLX's fallback takes twice as many operations.
    """
    return scoring.softcap is not None or not current_device().fuses


def _scaled(q: mx.array, scale: float) -> mx.array:
    return q if scale == 1.0 else q * scale


def _decode_spelled_out(
    q: mx.array, k: mx.array, v: mx.array, batch: DecodeBatch | RowKeys, scoring: Scoring
) -> mx.array:
    """Attend for scaled q `[B, heads, head_dim]` over k and v `[B, kv_heads, S, dim]`."""
    count, heads, dim = q.shape
    kv_heads = k.shape[1]
    scores = q.reshape(count, kv_heads, heads // kv_heads, dim) @ k.swapaxes(-1, -2)
    scores = capped(scores, scoring.softcap)
    sinks = None if scoring.sinks is None else scoring.sinks.reshape(kv_heads, -1, 1)
    out = attention_weights(scores, batch.bias.astype(q.dtype), sinks) @ v
    return out.reshape(count, heads, -1)


def _chunk_spelled_out(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    chunk: Chunk,
    rows: slice,
    scoring: Scoring,
    *,
    narrow: bool,
) -> mx.array:
    """Attend for rows of a chunk: q `[1, heads, t, head_dim]`, k and v `[1, kv_heads, S, dim]`.

    Args:
        narrow: compute softmax as `decode` does, which is slower. Needed where results are rounded
            to fewer bits than float32 has, and where rows must get the same bits in both.
    """
    q = _scaled(q, scoring.scale)
    _, heads, count, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    bias = chunk.bias(rows, keys).astype(q.dtype)
    scores = q.reshape(1, kv_heads, -1, dim) @ k.swapaxes(-1, -2)
    scores = capped(scores, scoring.softcap).reshape(1, kv_heads, -1, count, keys)
    if narrow or scoring.sinks is not None:
        sinks = None if scoring.sinks is None else scoring.sinks.reshape(kv_heads, -1, 1, 1)
        weights = attention_weights(scores, bias, sinks)
    else:
        weights = _softmax_of_many(scores + bias)
    out = weights.reshape(1, kv_heads, -1, keys) @ v
    return out.reshape(1, heads, count, -1)


def _softmax_of_many(scores: mx.array) -> mx.array:
    """Return softmax along the last axis; scores in float32.

    MLX's own takes 12 ns an element on a CPU, nearly all for the exponential; powers of two take 4.
    For few scores the extra operations would cost more.
    """
    below = scores - scores.max(axis=-1, keepdims=True)
    raised = mx.power(2.0, below * math.log2(math.e))
    return raised / raised.sum(axis=-1, keepdims=True)
