"""Attention over plain blocks: MLX's fused attention if there is one, else single operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mlx.core as mx

from quire.attention.backend import Scoring
from quire.attention.reference.cuts import Chunk, DecodeBatch, KeyPlaces, RowKeys
from quire.attention.reference.softmax import attention_weights, capped
from quire.cache.formats.base import LayerStore
from quire.device.device import current_device

SCORES = 32 << 20
"""Most attention scores (heads * rows * keys) of a chunk."""


def decode(
    q: mx.array, store: LayerStore, batch: DecodeBatch, scoring: Scoring, after: list[mx.array]
) -> mx.array:
    """Attend for the rows of sequences with one row each, `[B, heads, head_dim]`.

    Args:
        after: arrays that are computed before any block is gathered.
    """

    def attend(q: mx.array, blocks: mx.array, scoring: Scoring) -> mx.array:
        count, heads, length = blocks.shape
        shape = (count, heads, length * batch.block_size, -1)
        read = [each[blocks].reshape(shape).astype(q.dtype) for each in store.arrays()]
        return _single_rows(q, *_keys_and_values(store, read), batch=batch, scoring=scoring)

    return _by_heads(q, store, batch.heads, scoring=scoring, attend=attend, after=after)


def rehearse(batch: DecodeBatch, scoring: Scoring) -> None:
    """Make the arrays that `decode` reads from the host."""
    _ = batch.heads, _mask(batch, scoring)


def _by_heads(
    q: mx.array,
    store: LayerStore,
    blocks: mx.array,
    scoring: Scoring,
    attend: Callable[[mx.array, mx.array, Scoring], mx.array],
    after: Sequence[mx.array] = (),
) -> mx.array:
    """Attend for queries `[t, heads, head_dim]`, for as many heads at a time as may be gathered.

    Args:
        blocks: rows of the store's arrays to gather, `[B, kv_heads, P]`.
        attend: attends for some heads: their queries and blocks.
        after: arrays that are computed before any block is gathered.
    """
    count, kv_heads, length = blocks.shape
    group, dims = q.shape[1] // kv_heads, sum(each.shape[-1] for each in store.arrays())
    head_bytes = count * length * store.shape.block_size * dims * 4  # float32 at most
    at_once = max(1, current_device().gathered_bytes // head_bytes)
    if at_once >= kv_heads and not after:
        return attend(q, blocks, scoring)
    outs = list(after[-1:])
    for first in range(0, kv_heads, at_once):
        heads = slice(first, min(kv_heads, first + at_once))
        own = slice(heads.start * group, heads.stop * group)
        some = mx.depends([blocks[:, heads]], outs[-1:])[0]
        outs.append(attend(q[:, own], some, scoring.of_heads(heads, group)))
    parts = outs[len(after[-1:]) :]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


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
        outs.append(_single_rows(q[rows], k, v, batch=RowKeys(some >= 0), scoring=scoring))
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)


def _mask(batch: DecodeBatch | RowKeys, scoring: Scoring) -> mx.array:
    """Return the mask of keys: numbers to add to scores where these are spelled out, else bools."""
    return batch.bias if _spells_out(scoring) else batch.mask


def _single_rows(
    q: mx.array, k: mx.array, v: mx.array, batch: DecodeBatch | RowKeys, scoring: Scoring
) -> mx.array:
    """Attend for q `[B, heads, head_dim]` over k and v `[B, kv_heads, S, dim]`, and over the keys
    beside them.
    """
    spelled, beside = _spells_out(scoring), 0
    mask = _mask(batch, scoring)
    if spelled:
        mask = mask.astype(q.dtype)
    if scoring.beside is not None:
        beside = scoring.beside.k.shape[2]
        k = mx.concatenate([k, scoring.beside.k.astype(k.dtype)], axis=2)
        v = mx.concatenate([v, scoring.beside.v.astype(v.dtype)], axis=2)
        mask = mx.pad(mask, [(0, 0)] * 3 + [(0, beside)], constant_values=0 if spelled else True)
    if spelled:
        return _decode_spelled_out(_scaled(q, scoring.scale), k, v, bias=mask, scoring=scoring)
    out = mx.fast.scaled_dot_product_attention(
        mx.expand_dims(q, 2),  # [B, heads, 1, head_dim]
        k,
        v,
        scale=scoring.scale,
        mask=mask,
        sinks=scoring.sinks,
    )
    return out.squeeze(2)


def prefill(q: mx.array, store: LayerStore, chunk: Chunk, scoring: Scoring) -> mx.array:
    """Attend for a chunk's rows, `[t, heads, head_dim]`, in tiles whose scores are bounded.

    With the compiled CPU kernels, rows get the same bits as in `decode`: whole blocks are read, and
    softmax is the same.
    """

    def attend(q: mx.array, blocks: mx.array, scoring: Scoring) -> mx.array:
        return _prefill_heads(q, store, blocks, chunk=chunk, scoring=scoring)

    return _by_heads(q, store, chunk.heads, scoring=scoring, attend=attend)


def _prefill_heads(
    q: mx.array, store: LayerStore, blocks: mx.array, chunk: Chunk, scoring: Scoring
) -> mx.array:
    """Attend for some heads of a chunk's rows; their blocks `[1, kv_heads, P]` are gathered."""
    arrays = store.arrays()
    alike = current_device().kernels is not None
    narrow = alike or arrays[0].dtype != mx.float32 or q.dtype != mx.float32
    count, size = q.shape[0], chunk.block_size if alike else 1
    seen = _whole(int(chunk.last[-1]) + 1, size)
    k, v = _keys_and_values(
        store, [_gathered(each, blocks)[:, :, :seen].astype(q.dtype) for each in arrays]
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
            outs.append(
                _chunk_spelled_out(*some, chunk=chunk, rows=rows, scoring=scoring, narrow=narrow)
            )
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


def _gathered(array: mx.array, blocks: mx.array) -> mx.array:
    """Gather blocks `[1, kv_heads, P]` to `[1, kv_heads, P * block_size, dim]`."""
    return array[blocks].reshape(1, blocks.shape[1], -1, array.shape[-1])


def _spells_out(scoring: Scoring) -> bool:
    """Return whether single operations replace MLX's fused attention.

    On a CPU there is none, and MLX's fallback takes twice as many operations.
    """
    return scoring.softcap is not None or not current_device().fuses


def _scaled(q: mx.array, scale: float) -> mx.array:
    return q if scale == 1.0 else q * scale


def _decode_spelled_out(
    q: mx.array, k: mx.array, v: mx.array, bias: mx.array, scoring: Scoring
) -> mx.array:
    """Attend for scaled q `[B, heads, head_dim]` over k and v `[B, kv_heads, S, dim]`."""
    count, heads, dim = q.shape
    kv_heads = k.shape[1]
    scores = q.reshape(count, kv_heads, heads // kv_heads, dim) @ k.swapaxes(-1, -2)
    scores = capped(scores, scoring.softcap)
    sinks = None if scoring.sinks is None else scoring.sinks.reshape(kv_heads, -1, 1)
    out = attention_weights(scores, bias, sinks) @ v
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
