"""The page format: full pages are coded at once, keys a channel, values a token.

Who sees what is a matter of position alone: a row reads the pages before its own as codes, and its
own page as written, as it does those that follow, where it belongs to an image that goes on. So
chunks, neighbours and prefix hits change nothing.
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx

from quire.cache.formats.base import LayerShape, LayerStore
from quire.cache.formats.codecs import AffineCodec
from quire.cache.formats.packing import Affine, affine, affine_parts, multiplies_codes
from quire.cache.formats.paging import page_rows, resized
from quire.cache.formats.softmax import Read, attend_chunk, weigh
from quire.cache.view import Block, Chunk, DecodeBatch, Ints, Tile, View
from quire.core.kv_format import KVFormat
from quire.kernels.blas import times_transposed


class PageKeys:
    """Keys of one page, a scale and a bias for each channel along the page's tokens.

    Trained models have channels many times larger than the rest, and constant offsets in them; a
    scale a channel is unmoved by both.
    """

    def __init__(self, shape: LayerShape, bits: int) -> None:
        self._tokens = shape.page_tokens
        self._layout = Affine(64 if shape.page_tokens % 64 == 0 else 32, bits)

    def parts(self) -> list[tuple[int, mx.Dtype]]:
        """(elements a channel, type) of each array."""
        return affine_parts(self._tokens, self._layout)

    def encode(self, k: mx.array) -> list[mx.array]:
        """`[..., page_tokens, head_dim]` to arrays `[..., head_dim, elements]`."""
        by_channel = k.astype(mx.float32).swapaxes(-1, -2)
        return list(affine(by_channel, self._layout, refit=True))

    def scores(self, q: mx.array, parts: list[mx.array]) -> mx.array:
        """`[..., M, head_dim]` times pages `[..., P, head_dim, -]`: `[..., M, P * page_tokens]`."""
        *lead, rows, dim = q.shape
        if not multiplies_codes(rows):
            keys = self._layout.decode(parts)
            return q @ keys.swapaxes(-3, -2).reshape(*lead, dim, -1)
        scores = self._layout.product(q[..., None, :, :], parts, transpose=False)
        return scores.swapaxes(-3, -2).reshape(*lead, rows, -1)


class PageStore(LayerStore):
    """Full pages as codes, `[pages * kv_heads, ...]`; open ones as written, in their own pool."""

    seals: ClassVar[bool] = True

    def __init__(self, shape: LayerShape, format: KVFormat) -> None:
        super().__init__(shape, format)
        self._key_codec, self._value_codec = _codecs(shape, format)
        tokens, dim = shape.page_tokens, shape.head_dim
        self._keys = [mx.zeros((0, dim, n), dtype=t) for n, t in self._key_codec.parts()]
        self._values = [mx.zeros((0, tokens, n), dtype=t) for n, t in self._value_codec.parts()]
        self._open_keys = mx.zeros((0, tokens, dim), dtype=shape.dtype)
        self._open_values = mx.zeros((0, tokens, dim), dtype=shape.dtype)

    @classmethod
    def page_bytes(cls, shape: LayerShape, format: KVFormat) -> int:
        keys, values = _codecs(shape, format)
        channel = sum(n * dtype.size for n, dtype in keys.parts())
        each = shape.head_dim * channel + shape.page_tokens * values.vector_bytes
        return shape.kv_heads * each

    @classmethod
    def open_page_bytes(cls, shape: LayerShape, format: KVFormat) -> int:
        return 2 * shape.kv_heads * shape.page_tokens * shape.head_dim * shape.dtype.size

    def resize(self, capacity: int, moves: tuple[tuple[int, int], ...]) -> None:
        for arrays in (self._keys, self._values):
            for number, array in enumerate(arrays):
                arrays[number] = resized(array, self.shape.kv_heads, capacity, moves)
                mx.eval(arrays[number])

    def resize_open(self, capacity: int, moves: tuple[tuple[int, int], ...]) -> None:
        self._open_keys = resized(self._open_keys, self.shape.kv_heads, capacity, moves)
        self._open_values = resized(self._open_values, self.shape.kv_heads, capacity, moves)
        mx.eval(self._open_keys, self._open_values)

    # -- writing -------------------------------------------------------------------------------

    def write(self, k: mx.array, v: mx.array, view: View) -> None:
        k, v = k.astype(self.shape.dtype), v.astype(self.shape.dtype)
        if view.decode_rows:
            self._write_decode(k[: view.decode_rows], v[: view.decode_rows], view)
        view.blocks[self] = [
            self._write_chunk(k[chunk.rows], v[chunk.rows], chunk) for chunk in view.chunks
        ]

    def _write_decode(self, k: mx.array, v: mx.array, view: View) -> None:
        rows, offsets = view.open_rows, view.write_offsets[: view.decode_rows]
        self._open_keys[rows, offsets] = k
        self._open_values[rows, offsets] = v
        if view.filled is not None:
            opens, pages = view.filled
            self._seal(self._open_keys[opens], self._open_values[opens], pages)

    def _write_chunk(self, k: mx.array, v: mx.array, chunk: Chunk) -> Block:
        """Fills the open page up, seals what is full, and leaves the rest open."""
        block = Block(
            self._in_pages(self._open_keys, k, chunk), self._in_pages(self._open_values, v, chunk)
        )
        full = chunk.full_pages
        if full:
            own = len(chunk.pages) - chunk.own_pages
            rows = page_rows(chunk.pages[own : own + full], self.shape.kv_heads)
            sealed = (full * self.shape.kv_heads, *self._open_keys.shape[1:])
            self._seal(block.keys[:full].reshape(sealed), block.values[:full].reshape(sealed), rows)
        # Even when it is full: the chunk's last row may be read once more, as a generating one.
        self._open_keys[chunk.open_rows] = block.keys[-1]
        self._open_values[chunk.open_rows] = block.values[-1]
        return block

    def _in_pages(self, opened: mx.array, new: mx.array, chunk: Chunk) -> mx.array:
        """The chunk's vectors behind those of its open page: `[n, kv_heads, page_tokens, dim]`."""
        kv_heads, tokens, dim = self.shape.kv_heads, self.shape.page_tokens, self.shape.head_dim
        new = new.swapaxes(0, 1)  # [kv_heads, t, dim]
        before = chunk.offset
        after = chunk.own_pages * tokens - before - new.shape[1]
        parts = [opened[chunk.open_rows][:, :before]] if before else []
        parts += [new, mx.zeros((kv_heads, after, dim), dtype=new.dtype)]
        return mx.concatenate(parts, axis=1).reshape(kv_heads, -1, tokens, dim).swapaxes(0, 1)

    def _seal(self, keys: mx.array, values: mx.array, rows: mx.array) -> None:
        """Codes pages `[n * kv_heads, page_tokens, dim]` into the rows of the pool."""
        for array, codes in zip(self._keys, self._key_codec.encode(keys), strict=True):
            array[rows] = codes
        for array, codes in zip(self._values, self._value_codec.encode(values), strict=True):
            array[rows] = codes

    # -- reading -------------------------------------------------------------------------------

    def attend(
        self, q: mx.array, view: View, *, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        q = q if scale == 1.0 else q * scale
        parts = [self._decode(q[batch.rows], batch, sinks) for batch in view.batches]
        for chunk, block in zip(view.chunks, view.blocks.get(self, ()), strict=True):
            parts.append(self._prefill(q[chunk.rows], chunk, block, sinks))
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return out.astype(q.dtype)

    def _decode(self, q: mx.array, batch: DecodeBatch, sinks: mx.array | None) -> mx.array:
        size, heads, dim = q.shape
        kv_heads = self.shape.kv_heads
        keys, values = self._open_keys[batch.open_heads], self._open_values[batch.open_heads]
        scores, mix = self._read(
            q.reshape(size, kv_heads, heads // kv_heads, dim), keys, values, batch.sealed_heads
        )
        sinks = None if sinks is None else sinks.reshape(kv_heads, -1, 1)
        return mix(weigh(scores, batch.own_page_bias, sinks)).reshape(size, heads, dim)

    def _prefill(self, q: mx.array, chunk: Chunk, block: Block, sinks: mx.array | None) -> mx.array:
        first_own = len(chunk.pages) - chunk.own_pages

        def read(some: mx.array, tile: Tile, rows: mx.array) -> Read:
            before = tile.own - tile.pages.start
            sealed = rows[:, :before] if before else None
            written = slice(tile.own - first_own, tile.pages.stop - first_own)
            keys, values = _joined(block.keys[written]), _joined(block.values[written])
            return self._read(some, keys, values, sealed)

        return attend_chunk(q, chunk, sinks, read)

    def _read(self, q: mx.array, keys: mx.array, values: mx.array, sealed: mx.array | None) -> Read:
        """Query vectors `[..., M, dim]` against their sealed pages and then their own.

        Args:
            keys, values: of their own page and those after, as written, `[..., tokens, dim]`.
            sealed: `[..., P]` rows of the pages before, if there are any.
        """
        scores = times_transposed(q, keys).astype(mx.float32)
        if sealed is None:
            return scores, lambda weights: weights @ values
        before = self._key_codec.scores(q, [array[sealed] for array in self._keys])
        tokens = keys.shape[-2]

        def mix(weights: mx.array) -> mx.array:
            coded = self._value_codec.mix(weights[..., :-tokens], self._value_codes(sealed))
            return weights[..., -tokens:] @ values + self._value_codec.turn_back(coded)

        return mx.concatenate([before.astype(mx.float32), scores], axis=-1), mix

    def _value_codes(self, rows: mx.array) -> list[mx.array]:
        """`[..., P]` rows to `[..., P * page_tokens, elements]` of each part."""
        shape = (*rows.shape[:-1], rows.shape[-1] * self.shape.page_tokens)
        return [array[rows].reshape(*shape, array.shape[-1]) for array in self._values]

    # -- pages as a whole ----------------------------------------------------------------------

    def arrays(self) -> list[mx.array]:
        return [*self._keys, *self._values, self._open_keys, self._open_values]

    def export(self, pages: Ints) -> list[mx.array]:
        rows = page_rows(pages, self.shape.kv_heads)
        return [array[rows] for array in (*self._keys, *self._values)]

    def restore(self, pages: Ints, contents: list[mx.array]) -> None:
        rows = page_rows(pages, self.shape.kv_heads)
        for array, content in zip((*self._keys, *self._values), contents, strict=True):
            array[rows] = content


def _joined(pages: mx.array) -> mx.array:
    """`[n, kv_heads, page_tokens, dim]` to `[kv_heads, n * page_tokens, dim]`."""
    count, kv_heads, _, dim = pages.shape
    return pages[0] if count == 1 else pages.swapaxes(0, 1).reshape(kv_heads, -1, dim)


def _codecs(shape: LayerShape, format: KVFormat) -> tuple[PageKeys, AffineCodec]:
    keys, bits = PageKeys(shape, int(format.key_bits)), int(format.value_bits)
    # Rotated elements are much alike; where steps are fine, a scale for 128 of them does as well.
    group = 128 if bits >= 6 and shape.head_dim % 128 == 0 else 64
    return keys, AffineCodec(shape.head_dim, bits, group, rotate=True, refit=True)
