"""Formats that code each token separately. Every key, the row's own too, is read as codes."""

from __future__ import annotations

from abc import abstractmethod

import mlx.core as mx

from quire.cache.formats.base import (
    CodedArrays,
    CodedLayout,
    CodedReader,
    LayerShape,
    PackedStore,
    ValuesInKeys,
    WrittenBlocks,
)
from quire.cache.formats.codecs import Codec
from quire.cache.formats.paging import gathered
from quire.cache.formats.slots import SlotMapping
from quire.core.kv_format import KVFormat
from quire.device.coding import VectorCoding
from quire.device.device import current_device


class TokenStore(PackedStore):
    """Codes of keys and values, `[blocks * kv_heads, block_size, elements]` for each part."""

    def __init__(self, shape: LayerShape, format: KVFormat) -> None:
        super().__init__(shape, format)
        self._key_codec, self._value_codec = self.codecs(shape, format)
        self._keys = [self._empty(*part) for part in self._key_codec.parts()]
        values = self._value_codec
        self._values = [] if values is None else [self._empty(*part) for part in values.parts()]
        self._read_values = values or ValuesInKeys(self._key_codec, shape.value_dim)
        codecs = (self._key_codec, values)
        self._codings = tuple(codec.coding for codec in codecs if codec is not None)
        self._layout, self._key_levels, self._value_levels = _layout(
            self._key_codec, values or self._key_codec
        )

    @classmethod
    def codecs(cls, shape: LayerShape, format: KVFormat) -> tuple[Codec, Codec | None]:
        """Return the codecs of keys and values: one object if both have the same coding.

        The values' codec is None if values start their keys.
        """
        key_bits, value_bits = cls.bits(format)
        if shape.value_in_key:
            return cls.codec(shape.head_dim, max(key_bits, value_bits), format), None
        keys = cls.codec(shape.head_dim, key_bits, format)
        if (shape.value_dim, value_bits) == (shape.head_dim, key_bits):
            return keys, keys
        return keys, cls.codec(shape.value_dim, value_bits, format)

    @classmethod
    @abstractmethod
    def bits(cls, format: KVFormat) -> tuple[int, int]:
        """Return the bits of a key's code and of a value's code."""

    @classmethod
    @abstractmethod
    def codec(cls, dim: int, bits: int, format: KVFormat) -> Codec:
        """Return the codec for vectors of `dim` elements."""

    @classmethod
    def block_bytes(cls, shape: LayerShape, format: KVFormat) -> int:
        codecs = cls.codecs(shape, format)
        size = sum(codec.vector_bytes for codec in codecs if codec is not None)
        return shape.kv_heads * shape.block_size * size

    @property
    def codings(self) -> tuple[VectorCoding, ...]:
        """The codings of keys, and of values unless they are part of their keys."""
        return self._codings

    def _empty(self, elements: int, dtype: mx.Dtype) -> mx.array:
        return mx.zeros((0, self.shape.block_size, elements), dtype=dtype)

    @property
    def block_arrays(self) -> tuple[list[mx.array], ...]:
        return self._keys, self._values

    def write(self, k: mx.array, v: mx.array, slots: SlotMapping) -> WrittenBlocks | None:
        operations, arrays = current_device().operations, self.arrays()
        vectors, places = (k, v)[: len(self._codings)], (slots.head_rows, slots.head_offsets)
        if not operations.write_codes(arrays, vectors, self._codings, *places):
            operations.write_vectors(arrays, self._encode(k, v), *places)
        return None

    def _encode(self, k: mx.array, v: mx.array) -> list[mx.array]:
        """Return the parts of keys and then of values."""
        if self._value_codec is None:
            return self._key_codec.encode(k)
        if self.shape.head_dim != self.shape.value_dim:
            return self._key_codec.encode(k) + self._value_codec.encode(v)
        # In a step of few tokens the number of operations is what coding costs.
        heads = self.shape.kv_heads
        both = self._key_codec.prepare(mx.concatenate([k, v], axis=1))
        if self._key_codec is self._value_codec:
            both = self._key_codec.code(both)
            return [part[:, :heads] for part in both] + [part[:, heads:] for part in both]
        keys = self._key_codec.code([part[:, :heads] for part in both])
        return keys + self._value_codec.code([part[:, heads:] for part in both])

    def transform(self, q: mx.array) -> mx.array:
        return self._key_codec.transform(q)

    def read(self, rows: mx.array) -> CodedReader:
        keys = gathered(self._keys, rows)
        values = gathered(self._values, rows) if self._values else keys
        return CodedReader(self._key_codec, self._read_values, keys, values=values)

    def coded(self) -> CodedArrays:
        values = self._values or self._keys
        return CodedArrays(
            [*self._keys, *self._key_levels], [*values, *self._value_levels], self._layout
        )

    def inverse_transform(self, x: mx.array) -> mx.array:
        return self._read_values.inverse_transform(x)


def _layout(keys: Codec, values: Codec) -> tuple[CodedLayout, list[mx.array], list[mx.array]]:
    """Return the layout of codes in a store's blocks, and the levels of keys and values, if any."""
    levels = [[] if codec.levels is None else [codec.levels] for codec in (keys, values)]
    layout = CodedLayout(
        keys.bits,
        values.bits,
        codebook=keys.levels is not None,
        by_channel=False,
        key_rotation=keys.rotation,
        value_rotation=values.rotation,
    )
    return layout, levels[0], levels[1]
