"""Blocks as the model writes them, or in another floating type by name."""

from __future__ import annotations

import mlx.core as mx

from quire.cache.formats.base import LayerShape, LayerStore, WrittenBlocks
from quire.cache.formats.paging import block_rows, resized
from quire.cache.formats.slots import SlotMapping
from quire.cache.specs import Ints
from quire.core.kv_format import KVFormat
from quire.device.dtypes import DTYPES


def plain_dtype(shape: LayerShape, format: KVFormat) -> mx.Dtype:
    """The type that plain blocks of a format are stored in."""
    return DTYPES[format.dtype] if format.dtype else shape.dtype


class PlainStore(LayerStore):
    """Keys and values, `[blocks * kv_heads, block_tokens, head_dim or value_dim]`."""

    def __init__(self, shape: LayerShape, format: KVFormat) -> None:
        super().__init__(shape, format)
        self._dtype = plain_dtype(shape, format)
        self._keys = mx.zeros((0, shape.block_tokens, shape.head_dim), dtype=self._dtype)
        self._values = mx.zeros((0, shape.block_tokens, shape.value_dim), dtype=self._dtype)

    @classmethod
    def block_bytes(cls, shape: LayerShape, format: KVFormat) -> int:
        vectors = shape.kv_heads * shape.block_tokens
        return vectors * (shape.head_dim + shape.value_dim) * plain_dtype(shape, format).size

    def resize(self, capacity: int, moves: tuple[tuple[int, int], ...]) -> None:
        # One array after the other, so that only one is held twice meanwhile.
        self._keys = resized(self._keys, self.shape.kv_heads, capacity, moves)
        mx.eval(self._keys)
        self._values = resized(self._values, self.shape.kv_heads, capacity, moves)
        mx.eval(self._values)

    def write(self, k: mx.array, v: mx.array, slots: SlotMapping) -> list[WrittenBlocks]:
        rows, offsets = slots.head_rows, slots.head_offsets
        self._keys[rows, offsets] = k.astype(self._dtype)
        self._values[rows, offsets] = v.astype(self._dtype)
        return []

    def arrays(self) -> list[mx.array]:
        return [self._keys, self._values]

    def export(self, blocks: Ints) -> list[mx.array]:
        rows = block_rows(blocks, self.shape.kv_heads)
        return [self._keys[rows], self._values[rows]]

    def restore(self, blocks: Ints, contents: list[mx.array]) -> None:
        rows = block_rows(blocks, self.shape.kv_heads)
        self._keys[rows], self._values[rows] = contents
