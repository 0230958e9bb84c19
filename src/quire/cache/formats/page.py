"""The page format: full blocks are coded at once, keys by channel, values by token.

What a row sees follows from its position alone. It reads earlier blocks as codes, and its own block
uncoded, as well as later ones if it belongs to an image that continues there. So chunks, neighbours
and prefix hits change nothing.
"""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx

from quire.cache.formats.base import (
    CodedArrays,
    CodedLayout,
    CodedReader,
    LayerShape,
    PackedStore,
    ValuesInKeys,
    WrittenBlocks,
    vector_sizes,
)
from quire.cache.formats.codecs import AffineCodec
from quire.cache.formats.packing import (
    Affine,
    affine,
    affine_coding,
    affine_parts,
    multiplies_codes,
)
from quire.cache.formats.paging import ANY_ROOM, Room, gathered, resize
from quire.cache.formats.slots import ChunkPlaces, SlotMapping, TailRows
from quire.core.kv_format import KVFormat
from quire.device.coding import Chunks, VectorCoding
from quire.device.device import current_device


class PageKeys:
    """Keys of one block, with a scale and a bias for each channel along the block's tokens.

    Trained models have channels many times larger than others, with constant offsets. A scale for
    each channel handles both.
    """

    def __init__(self, shape: LayerShape, bits: int) -> None:
        self._tokens = shape.block_size
        self._layout = Affine(64 if shape.block_size % 64 == 0 else 32, bits)
        self._coding = affine_coding(self._tokens, self._layout, refit=True)

    @property
    def bits(self) -> int:
        """Bits per code."""
        return self._layout.bits

    @property
    def coding(self) -> VectorCoding:
        """The coding of one channel, as kernels compute it."""
        return self._coding

    def parts(self) -> list[tuple[int, mx.Dtype]]:
        """(elements a channel, type) of each array."""
        return affine_parts(self._tokens, self._layout)

    def encode(self, k: mx.array) -> list[mx.array]:
        """Code `[..., block_size, head_dim]` into arrays `[..., head_dim, elements]`."""
        by_channel = k.astype(mx.float32).swapaxes(-1, -2)
        coded = current_device().operations.encode([mx.contiguous(by_channel)], [self._coding])
        if coded is not None:
            return coded
        return list(affine(by_channel, self._layout, refit=True))

    def scores(self, q: mx.array, parts: list[mx.array]) -> mx.array:
        """Return `[..., M, head_dim]` times blocks `[..., P, head_dim, -]`: `[..., M, S]`."""
        *lead, rows, dim = q.shape
        if not multiplies_codes(rows):
            keys = self._layout.decode(parts)
            return q @ keys.swapaxes(-3, -2).reshape(*lead, dim, -1)
        scores = self._layout.product(q[..., None, :, :], parts, transpose=False)
        return scores.swapaxes(-3, -2).reshape(*lead, rows, -1)

    def weighted_sum(self, weights: mx.array, parts: list[mx.array]) -> mx.array:
        """Return `[..., M, S]` times blocks `[..., P, head_dim, -]` as values: `[..., M,
        head_dim]`.
        """
        by_block = mx.unflatten(weights, -1, (-1, self._tokens)).swapaxes(-3, -2)
        if not multiplies_codes(weights.shape[-2]):
            return (by_block @ self._layout.decode(parts).swapaxes(-1, -2)).sum(axis=-3)
        return self._layout.product(by_block, parts, transpose=True).sum(axis=-3)

    def decode(self, parts: list[mx.array]) -> mx.array:
        """Decode blocks `[..., P, head_dim, -]` to float32 `[..., P * block_size, head_dim]`."""
        return self._layout.decode(parts).swapaxes(-1, -2).flatten(-3, -2)

    def inverse_transform(self, x: mx.array) -> mx.array:
        """Return `x` unchanged: `weighted_sum` is in the model's coordinates already."""
        return x


class PageStore(PackedStore):
    """Full blocks coded, `[blocks * kv_heads, ...]`; tails uncoded, in their own pool."""

    has_tail: ClassVar[bool] = True

    def __init__(self, shape: LayerShape, format: KVFormat) -> None:
        super().__init__(shape, format)
        self._key_codec, self._value_codec = _codecs(shape, format)
        tokens, dim = shape.block_size, shape.head_dim
        self._keys = [mx.zeros((0, dim, n), dtype=t) for n, t in self._key_codec.parts()]
        values = [] if self._value_codec is None else self._value_codec.parts()
        self._values = [mx.zeros((0, tokens, n), dtype=t) for n, t in values]
        self._read_values = self._value_codec or ValuesInKeys(self._key_codec, shape.value_dim)
        bits = self._key_codec.bits
        layout = CodedLayout(
            bits,
            self._value_codec.bits if self._value_codec else bits,
            codebook=False,
            by_channel=True,
            key_rotation=None,
            value_rotation=self._value_codec.rotation if self._value_codec else None,
        )
        self._codings = [self._key_codec.coding]
        if self._value_codec is not None:
            self._codings.append(self._value_codec.coding)
        dims = vector_sizes(shape)
        self._tails = [mx.zeros((0, tokens, dim), dtype=shape.dtype) for dim in dims]
        self._coded = CodedArrays(self._keys, self._values or self._keys, layout)

    @classmethod
    def block_bytes(cls, shape: LayerShape, format: KVFormat) -> int:
        keys, values = _codecs(shape, format)
        channel = sum(n * dtype.size for n, dtype in keys.parts())
        token = 0 if values is None else values.vector_bytes
        each = shape.head_dim * channel + shape.block_size * token
        return shape.kv_heads * each

    @classmethod
    def tail_bytes(cls, shape: LayerShape, format: KVFormat) -> int:
        elements = shape.block_size * sum(vector_sizes(shape))
        return shape.kv_heads * elements * shape.dtype.size

    @property
    def block_arrays(self) -> tuple[list[mx.array], ...]:
        return self._keys, self._values

    def resize_tails(
        self, capacity: int, moves: tuple[tuple[int, int], ...], room: Room = ANY_ROOM
    ) -> None:
        resize(self._tails, self.shape.kv_heads, capacity, moves=moves, room=room)

    # -- writing -------------------------------------------------------------------------------

    def write(self, k: mx.array, v: mx.array, slots: SlotMapping) -> WrittenBlocks | None:
        singles, coded = slots.singles, list[mx.array]()
        if singles is not None:
            coded = self._write_singles(singles.of(k), singles.of(v), singles)
            if singles.every:
                return None
        k, v = k.astype(self.shape.dtype), v.astype(self.shape.dtype)
        if slots.tails is None:
            self._code([self._whole(k), self._whole(v)], slots.whole_rows)
        return (
            None if slots.chunks is None else self._write_chunks(k, v, slots.chunks, before=coded)
        )

    def _write_singles(self, k: mx.array, v: mx.array, singles: TailRows) -> list[mx.array]:
        """Append each row to its tail. Return the codes of the tails that are full now."""
        vectors = (k, v)[: len(self._tails)]
        current_device().operations.write_vectors(
            self._tails, vectors, singles.head_rows, offsets=singles.head_offsets
        )
        if singles.filled is None:
            return []
        tails, blocks = singles.filled
        return self._code([array[tails] for array in self._tails], blocks)

    def _whole(self, vectors: mx.array) -> mx.array:
        """Return `[n * block_size, kv_heads, -]` as blocks, `[n * kv_heads, block_size, -]`."""
        blocks = mx.unflatten(vectors, 0, (-1, self.shape.block_size))
        return blocks.swapaxes(1, 2).flatten(0, 1)

    def _write_chunks(
        self, k: mx.array, v: mx.array, places: ChunkPlaces, before: list[mx.array]
    ) -> WrittenBlocks:
        """Code the blocks that chunks fill, tails included; the rest becomes the new
        tails.

        It takes as many operations for all chunks of a step as for one.

        Args:
            before: what this step has made of other tails.
        """
        vectors, blocks = (k, v)[: len(self._tails)], places.blocks
        given = Chunks(self._tails, vectors, blocks)
        coded = current_device().operations.code_blocks(given, self._codings)
        if coded is not None:
            written = coded.written
            self._store(coded.codes, places.full_rows)
        else:
            written = [
                self._in_blocks(tails, new, places)
                for tails, new in zip(self._tails, vectors, strict=True)
            ]
            if places.full is not None:
                self._code([each[places.full].flatten(0, 1) for each in written], places.full_rows)
        # Even when it is full: a chunk's last row may be read once more, as a generating one.
        write_rows = current_device().operations.write_rows
        for tails, each in zip(self._tails, written, strict=True):
            last = mx.depends([each[places.last].flatten(0, 1)], before)[0]
            write_rows(tails, last, places.tail_rows)
        return WrittenBlocks(*self._keys_and_values(written), blocks.starts)

    def _in_blocks(self, tails: mx.array, new: mx.array, places: ChunkPlaces) -> mx.array:
        """Return chunks' vectors after their tails': `[n, kv_heads, block_size, dim]`."""
        parts = [new.flatten(0, 1), mx.zeros((1, new.shape[-1]), dtype=new.dtype)]
        if places.started_rows is not None:
            parts.append(tails[places.started_rows].flatten(0, 1))
        return mx.concatenate(parts)[places.sources]

    def _code(self, vectors: list[mx.array], rows: mx.array) -> list[mx.array]:
        """Code keys, and values that are not part of them, into the pool's rows. Return the codes.

        Args:
            vectors: `[n * kv_heads, block_size, -]` each.
        """
        codes = self._key_codec.encode(vectors[0])
        if self._value_codec is not None:
            codes += self._value_codec.encode(vectors[1])
        self._store(codes, rows)
        return codes

    def _store(self, codes: list[mx.array], rows: mx.array) -> None:
        """Write codes of keys, and of values that are not part of them, into the pool's rows."""
        for array, part in zip((*self._keys, *self._values), codes, strict=True):
            array[rows] = part

    def _keys_and_values(self, vectors: list[mx.array]) -> tuple[mx.array, mx.array]:
        """Convert vectors to tail keys `[..., head_dim]` and values `[..., value_dim]`."""
        keys, *values = vectors
        return keys, values[0] if values else keys[..., : self.shape.value_dim]

    # -- reading -------------------------------------------------------------------------------

    def read(self, rows: mx.array) -> CodedReader:
        keys = [array[rows] for array in self._keys]
        values = gathered(self._values, rows) if self._values else keys
        return CodedReader(self._key_codec, self._read_values, keys, values=values)

    def coded(self) -> CodedArrays:
        return self._coded

    def inverse_transform(self, x: mx.array) -> mx.array:
        return self._read_values.inverse_transform(x)

    def tail_arrays(self) -> tuple[mx.array, mx.array]:
        return self._keys_and_values(self._tails)

    def tails(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        return self._keys_and_values([array[rows] for array in self._tails])

    @property
    def lists(self) -> tuple[list[mx.array], ...]:
        return (*self.block_arrays, self._tails)

    def place(self, slots: SlotMapping) -> None:
        singles = slots.singles
        assert singles is not None, "sequences have one row"
        _ = singles.head_rows, singles.head_offsets, singles.filled


def _codecs(shape: LayerShape, format: KVFormat) -> tuple[PageKeys, AffineCodec | None]:
    """Return the codecs of keys and values; None for values that are part of their keys."""
    bits = int(format.value_bits)
    if shape.value_in_key:
        return PageKeys(shape, max(int(format.key_bits), bits)), None
    keys = PageKeys(shape, int(format.key_bits))
    # Rotated elements are much alike; where steps are fine, a scale for 128 of them does as well.
    group = 128 if bits >= 6 and shape.value_dim % 128 == 0 else 64
    return keys, AffineCodec(shape.value_dim, bits, group, rotate=True, refit=True)
