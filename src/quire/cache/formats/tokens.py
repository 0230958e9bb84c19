"""Formats that code every token by itself: every key, a row's own too, is read as its code."""

from __future__ import annotations

from abc import abstractmethod

import mlx.core as mx

from quire.cache.formats.base import LayerShape, LayerStore
from quire.cache.formats.codecs import Codec
from quire.cache.formats.paging import page_rows, resized
from quire.cache.formats.softmax import Read, attend_chunk, weigh
from quire.cache.view import Chunk, DecodeBatch, Ints, View
from quire.core.kv_format import KVFormat


class TokenStore(LayerStore):
    """Codes of keys and values, `[pages * kv_heads, page_tokens, elements]` a part."""

    def __init__(self, shape: LayerShape, format: KVFormat) -> None:
        super().__init__(shape, format)
        self._key_codec, self._value_codec = self.codecs(shape.head_dim, format)
        self._keys = [self._empty(*part) for part in self._key_codec.parts()]
        self._values = [self._empty(*part) for part in self._value_codec.parts()]

    @classmethod
    @abstractmethod
    def codecs(cls, head_dim: int, format: KVFormat) -> tuple[Codec, Codec]:
        """Those of keys and of values; one object where both are coded alike."""

    @classmethod
    def page_bytes(cls, shape: LayerShape, format: KVFormat) -> int:
        size = sum(codec.vector_bytes for codec in cls.codecs(shape.head_dim, format))
        return shape.kv_heads * shape.page_tokens * size

    def _empty(self, elements: int, dtype: mx.Dtype) -> mx.array:
        return mx.zeros((0, self.shape.page_tokens, elements), dtype=dtype)

    def resize(self, capacity: int, moves: tuple[tuple[int, int], ...]) -> None:
        for arrays in (self._keys, self._values):
            for number, array in enumerate(arrays):
                arrays[number] = resized(array, self.shape.kv_heads, capacity, moves)
                mx.eval(arrays[number])

    def write(self, k: mx.array, v: mx.array, view: View) -> None:
        for array, codes in zip(self.arrays(), self._encode(k, v), strict=True):
            array[view.write_rows, view.write_offsets] = codes

    def _encode(self, k: mx.array, v: mx.array) -> list[mx.array]:
        """The parts of keys and then of values."""
        # In a step of few tokens the number of operations is what coding costs.
        heads = self.shape.kv_heads
        both = self._key_codec.prepare(mx.concatenate([k, v], axis=1))
        if self._key_codec is self._value_codec:
            both = self._key_codec.code(both)
            return [part[:, :heads] for part in both] + [part[:, heads:] for part in both]
        keys = self._key_codec.code([part[:, :heads] for part in both])
        return keys + self._value_codec.code([part[:, heads:] for part in both])

    def attend(
        self, q: mx.array, view: View, *, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        q = q if scale == 1.0 else q * scale
        parts = [self._decode(q[batch.rows], batch, sinks) for batch in view.batches]
        parts += [self._prefill(q[chunk.rows], chunk, sinks) for chunk in view.chunks]
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return out.astype(q.dtype)

    def _decode(self, q: mx.array, batch: DecodeBatch, sinks: mx.array | None) -> mx.array:
        size, heads, _ = q.shape
        kv_heads = self.shape.kv_heads
        q = self._key_codec.turn(q).reshape(size, kv_heads, heads // kv_heads, -1)
        scores, mix = self._read(q, batch.heads)
        sinks = None if sinks is None else sinks.reshape(kv_heads, -1, 1)
        return mix(weigh(scores, batch.bias, sinks)).reshape(size, heads, -1)

    def _prefill(self, q: mx.array, chunk: Chunk, sinks: mx.array | None) -> mx.array:
        turned = self._key_codec.turn(q)
        return attend_chunk(turned, chunk, sinks, lambda q, _, rows: self._read(q, rows))

    def _read(self, q: mx.array, rows: mx.array) -> Read:
        """Turned query vectors `[..., M, size]` against the pages in rows `[..., P]`."""
        keys, values = self._gather(self._keys, rows), self._gather(self._values, rows)

        def mix(weights: mx.array) -> mx.array:
            return self._value_codec.turn_back(self._value_codec.mix(weights, values))

        return self._key_codec.scores(q, keys), mix

    def _gather(self, arrays: list[mx.array], rows: mx.array) -> list[mx.array]:
        """`[..., P]` rows to `[..., P * page_tokens, elements]` of each part."""
        shape = (*rows.shape[:-1], rows.shape[-1] * self.shape.page_tokens)
        return [array[rows].reshape(*shape, array.shape[-1]) for array in arrays]

    def arrays(self) -> list[mx.array]:
        return [*self._keys, *self._values]

    def export(self, pages: Ints) -> list[mx.array]:
        rows = page_rows(pages, self.shape.kv_heads)
        return [array[rows] for array in self.arrays()]

    def restore(self, pages: Ints, contents: list[mx.array]) -> None:
        rows = page_rows(pages, self.shape.kv_heads)
        for array, content in zip(self.arrays(), contents, strict=True):
            array[rows] = content
