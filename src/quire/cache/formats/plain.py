"""Blocks in the model's type, or in another floating type."""

from __future__ import annotations

import mlx.core as mx

from quire.cache.formats.base import LayerShape, LayerStore, WrittenBlocks, vector_sizes
from quire.cache.formats.slots import SlotMapping
from quire.core.kv_format import KVFormat
from quire.device.device import current_device
from quire.device.dtypes import DTYPES


def plain_dtype(shape: LayerShape, format: KVFormat) -> mx.Dtype:
    """Return the type that plain blocks of a format are stored in."""
    return DTYPES[format.dtype] if format.dtype else shape.dtype


class PlainStore(LayerStore):
    """Uncoded keys and values, `[blocks * kv_heads, block_size, head_dim or value_dim]`.

    Keys alone if these start with the values.
    """

    def __init__(self, shape: LayerShape, format: KVFormat) -> None:
        super().__init__(shape, format)
        self._dtype = plain_dtype(shape, format)
        dims = vector_sizes(shape)
        self._arrays = [mx.zeros((0, shape.block_size, dim), dtype=self._dtype) for dim in dims]

    @classmethod
    def block_bytes(cls, shape: LayerShape, format: KVFormat) -> int:
        vectors = shape.kv_heads * shape.block_size
        return vectors * sum(vector_sizes(shape)) * plain_dtype(shape, format).size

    @property
    def block_arrays(self) -> tuple[list[mx.array], ...]:
        return (self._arrays,)

    def arrays(self) -> list[mx.array]:
        return [*self._arrays]  # each step asks each layer

    def write(self, k: mx.array, v: mx.array, slots: SlotMapping) -> WrittenBlocks | None:
        vectors = (k, v)[: len(self._arrays)]
        current_device().operations.write_vectors(
            self._arrays, vectors, slots.head_rows, offsets=slots.head_offsets
        )
        return None
