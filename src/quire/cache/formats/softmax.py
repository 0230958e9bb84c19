"""Attention weights over coded keys, for generating rows and for prompts by the same arithmetic.

A token's codes follow from its attention a layer below. If reading a prompt rounded otherwise than
generating does, a token that is read again (after a pre-emption, or as part of a longer prompt)
would now and then get another code, and with it other logits.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from quire.cache.view import Chunk, Tile

Read = tuple[mx.array, Callable[[mx.array], mx.array]]
"""Scores `[kv_heads, M, S]` of M query vectors, and what turns weights into outputs."""


def weigh(scores: mx.array, bias: mx.array, sinks: mx.array | None) -> mx.array:
    """The weights of all keys of a row, float32.

    Args:
        scores: `[..., S]`.
        bias: 0 where visible, else minus infinity; broadcasts against them.
        sinks: `[..., 1]`, logits that take weight and give nothing; broadcasts likewise.
    """
    scores = scores + bias
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    extra = mx.broadcast_to(sinks.astype(scores.dtype), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, extra], axis=-1), axis=-1, precise=True)[..., :-1]


def attend_chunk(
    q: mx.array,
    chunk: Chunk,
    sinks: mx.array | None,
    read: Callable[[mx.array, Tile, mx.array], Read],
) -> mx.array:
    """Attention of a chunk's rows, `[t, heads, -1]`, a tile at a time.

    Args:
        q: `[t, heads, -1]`, scaled.
        sinks: `[heads]`.
        read: takes query vectors `[kv_heads, M, -1]`, their tile, and the rows of the pool's arrays
            that hold the tile's pages, `[kv_heads, P]`. These wait for the tile before, so that
            one tile's scores and decoded keys are in memory at a time.
    """
    count, heads, size = q.shape
    kv_heads = chunk.kv_heads
    grouped = q.reshape(count, kv_heads, -1, size).transpose(1, 2, 0, 3)
    if sinks is not None:
        sinks = sinks.reshape(kv_heads, -1, 1, 1)
    outs: list[mx.array] = []
    for tile in chunk.tiles():
        some = grouped[:, :, tile.rows].reshape(kv_heads, -1, size)
        rows = mx.depends([chunk.heads[0, :, tile.pages]], outs[-1:])[0]
        scores, mix = read(some, tile, rows)
        by_head = (kv_heads, heads // kv_heads, -1)
        scores = scores.astype(mx.float32).reshape(*by_head, scores.shape[-1])
        weights = weigh(scores, tile.bias, sinks)
        out = mix(weights.reshape(kv_heads, -1, weights.shape[-1]))
        outs.append(out.reshape(*by_head, out.shape[-1]))
    # [kv_heads, G, t, -1] each
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)
    return out.transpose(2, 0, 1, 3).reshape(count, heads, -1)
