"""Pages as the model writes them, or in another floating type by name."""

from __future__ import annotations

import math

import mlx.core as mx

from quire.cache.dtypes import DTYPES
from quire.cache.formats.base import LayerShape, LayerStore
from quire.cache.formats.paging import page_rows, resized
from quire.cache.view import Chunk, DecodeBatch, Ints, View
from quire.core.kv_format import KVFormat

SCORES = 32 << 20
"""Attention scores (heads * rows * keys) that a chunk may hold at once."""


def plain_dtype(shape: LayerShape, format: KVFormat) -> mx.Dtype:
    """The type that plain pages of a format are stored in."""
    return DTYPES[format.dtype] if format.scheme == "plain" and format.dtype else shape.dtype


def _decode_spelled_out(q: mx.array, k: mx.array, v: mx.array, bias: mx.array) -> mx.array:
    """Attention of generating rows; q `[B, heads, head_dim]`, scaled, k and v `[B, kv_heads, ...]`.

    On a CPU MLX has no fused kernel, and what it falls back to takes twice as many operations.
    """
    size, heads, dim = q.shape
    kv_heads = k.shape[1]
    scores = q.reshape(size, kv_heads, heads // kv_heads, dim) @ k.swapaxes(-1, -2)
    out = mx.softmax(scores + bias, axis=-1, precise=True) @ v
    return out.reshape(size, heads, dim)


def _softmax_of_many(scores: mx.array) -> mx.array:
    """Softmax along the last axis; scores in float32.

    MLX's own takes 12 ns an element on a CPU, all but one of them for the exponential; its powers
    of two take 4. Of few scores the operations would cost more than that saves.
    """
    below = scores - scores.max(axis=-1, keepdims=True)
    raised = mx.power(2.0, below * math.log2(math.e))
    return raised / raised.sum(axis=-1, keepdims=True)


def _chunk_spelled_out(
    q: mx.array, k: mx.array, v: mx.array, bias: mx.array, *, narrow: bool
) -> mx.array:
    """The same for a chunk; q `[1, heads, t, head_dim]`, scaled, k and v `[1, kv_heads, S, ...]`.

    Args:
        narrow: what is computed gets rounded to fewer bits than float32 has. Softmax is as in
            generating then: rounding could else turn out differently for a token read again.
    """
    _, heads, rows, dim = q.shape
    kv_heads, keys = k.shape[1:3]
    scores = q.reshape(1, kv_heads, -1, dim) @ k.swapaxes(-1, -2)
    scores = scores.reshape(1, kv_heads, -1, rows, keys) + bias
    weights = mx.softmax(scores, axis=-1, precise=True) if narrow else _softmax_of_many(scores)
    out = weights.reshape(1, kv_heads, -1, keys) @ v
    return out.reshape(1, heads, rows, dim)


class PlainStore(LayerStore):
    """Keys and values, `[pages * kv_heads, page_tokens, head_dim]` each."""

    def __init__(self, shape: LayerShape, format: KVFormat) -> None:
        super().__init__(shape, format)
        self._dtype = plain_dtype(shape, format)
        self.keys = mx.zeros((0, shape.page_tokens, shape.head_dim), dtype=self._dtype)
        self.values = mx.zeros((0, shape.page_tokens, shape.head_dim), dtype=self._dtype)

    @classmethod
    def page_bytes(cls, shape: LayerShape, format: KVFormat) -> int:
        elements = 2 * shape.kv_heads * shape.page_tokens * shape.head_dim
        return elements * plain_dtype(shape, format).size

    def resize(self, capacity: int, moves: tuple[tuple[int, int], ...]) -> None:
        # One array after the other, so that only one is held twice meanwhile.
        self.keys = resized(self.keys, self.shape.kv_heads, capacity, moves)
        mx.eval(self.keys)
        self.values = resized(self.values, self.shape.kv_heads, capacity, moves)
        mx.eval(self.values)

    def write(self, k: mx.array, v: mx.array, view: View) -> None:
        rows, offsets = view.write_rows, view.write_offsets
        self.keys[rows, offsets] = k.astype(self._dtype)
        self.values[rows, offsets] = v.astype(self._dtype)

    def attend(
        self, q: mx.array, view: View, *, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        parts = [self._decode(q, batch, scale, sinks) for batch in view.batches]
        parts += [self._prefill(q, chunk, scale, sinks) for chunk in view.chunks]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _decode(
        self, q: mx.array, batch: DecodeBatch, scale: float, sinks: mx.array | None
    ) -> mx.array:
        if batch.rows.stop - batch.rows.start != q.shape[0]:
            q = q[batch.rows]
        size, kv_heads, pages = batch.heads.shape
        shape = (size, kv_heads, pages * self.shape.page_tokens, self.shape.head_dim)
        k = self.keys[batch.heads].reshape(shape).astype(q.dtype)
        v = self.values[batch.heads].reshape(shape).astype(q.dtype)
        if sinks is None and mx.default_device() == mx.cpu:
            q = q if scale == 1.0 else q * scale
            return _decode_spelled_out(q, k, v, batch.bias.astype(q.dtype))
        out = mx.fast.scaled_dot_product_attention(
            q[:, :, None],  # [B, heads, 1, head_dim]
            k,
            v,
            scale=scale,
            mask=batch.mask,
            sinks=sinks,
        )
        return out[:, :, 0]

    def _prefill(self, q: mx.array, chunk: Chunk, scale: float, sinks: mx.array | None) -> mx.array:
        count = chunk.rows.stop - chunk.rows.start
        if count != q.shape[0]:
            q = q[chunk.rows]
        keys = int(chunk.last[-1]) + 1
        shape = (1, self.shape.kv_heads, -1, self.shape.head_dim)
        k = self.keys[chunk.heads].reshape(shape)[:, :, :keys].astype(q.dtype)
        v = self.values[chunk.heads].reshape(shape)[:, :, :keys].astype(q.dtype)
        q = q.swapaxes(0, 1)[None]  # [1, heads, t, head_dim]
        tile = max(1, SCORES // (q.shape[1] * keys))
        parts = []
        for start in range(0, count, tile):
            rows = slice(start, min(start + tile, count))
            seen = keys - count + rows.stop if chunk.causal else keys
            part = self._see(
                q[:, :, rows], k[:, :, :seen], v[:, :, :seen], chunk, rows, scale, sinks
            )
            parts.append(part)
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        return out[0].swapaxes(0, 1)  # [t, heads, head_dim]

    def _see(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        chunk: Chunk,
        rows: slice,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Some rows of a chunk, `[1, heads, t, head_dim]`, and the keys that any of them sees."""
        if sinks is None and mx.default_device() == mx.cpu:
            q = q if scale == 1.0 else q * scale
            bias = chunk.bias(rows, k.shape[2]).astype(q.dtype)
            narrow = self._dtype != mx.float32 or q.dtype != mx.float32
            return _chunk_spelled_out(q, k, v, bias, narrow=narrow)
        mask = "causal" if chunk.causal else chunk.mask[rows]
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]

    def export(self, pages: Ints) -> list[mx.array]:
        rows = page_rows(pages, self.shape.kv_heads)
        return [self.keys[rows], self.values[rows]]

    def restore(self, pages: Ints, contents: list[mx.array]) -> None:
        rows = page_rows(pages, self.shape.kv_heads)
        self.keys[rows], self.values[rows] = contents
