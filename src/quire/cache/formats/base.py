"""The interface of a KV format: how blocks are coded, stored and read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import mlx.core as mx

from quire.cache.formats.paging import ANY_ROOM, Room, block_rows, resize
from quire.cache.formats.slots import SlotMapping
from quire.cache.specs import KVSpec
from quire.core.arrays import Ints
from quire.core.kv_format import KVFormat
from quire.device.coding import VectorRotation


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Vectors of a layer per token: keys `[kv_heads, head_dim]`, values `[kv_heads, value_dim]`.

    Attributes:
        block_size: tokens per block.
        dtype: type of the computed keys and values, which is the model's.
        value_in_key, index_dim: see `KVSpec`.
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    block_size: int
    dtype: mx.Dtype
    value_in_key: bool = False
    index_dim: int = 0

    @staticmethod
    def of(spec: KVSpec, block_size: int, dtype: mx.Dtype) -> LayerShape:
        """Return the shape that layers of a spec store."""
        sizes = spec.kv_heads, spec.head_dim, spec.value_dim
        return LayerShape(
            *sizes,
            block_size=block_size,
            dtype=dtype,
            value_in_key=spec.value_in_key,
            index_dim=spec.index_dim,
        )

    @property
    def index(self) -> LayerShape | None:
        """The shape of an indexer's plain keys: one head, no value. None without an indexer."""
        dim = self.index_dim
        return (
            LayerShape(1, dim, dim, block_size=self.block_size, dtype=self.dtype, value_in_key=True)
            if dim
            else None
        )


def vector_sizes(shape: LayerShape) -> tuple[int, ...]:
    """Return the sizes of a token's vectors: its key, and its value unless part of the key."""
    return (shape.head_dim,) if shape.value_in_key else (shape.head_dim, shape.value_dim)


@dataclass(frozen=True, slots=True)
class WrittenBlocks:
    """Blocks that chunks wrote to, uncoded; each starts with its chunk's former tail.

    Attributes:
        keys, values: `[n, kv_heads, block_size, head_dim or value_dim]`.
        starts: `[chunks + 1]`; blocks `[starts[c], starts[c + 1])` are chunk c's.
    """

    keys: mx.array
    values: mx.array
    starts: Ints

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.starts) - 1

    def part(self, chunks: slice) -> WrittenBlocks:
        """Return the blocks of adjacent chunks `[start, end)`."""
        if (chunks.start, chunks.stop) == (0, self.chunks):
            return self
        starts = self.starts[chunks.start : chunks.stop + 1]
        blocks = slice(int(starts[0]), int(starts[-1]))
        return WrittenBlocks(self.keys[blocks], self.values[blocks], starts - starts[0])


class BlockReader(ABC):
    """Some blocks of a layer as attention multiplies them: `[..., S]` keys and values.

    Queries are in the format's coordinates, see `PackedStore.transform`; outputs are the model's.
    """

    @abstractmethod
    def scores(self, q: mx.array) -> mx.array:
        """Return `[..., M, size]` times the keys: `[..., M, S]`."""

    @abstractmethod
    def weighted_sum(self, weights: mx.array) -> mx.array:
        """Return `[..., M, S]` times the values: `[..., M, value_dim]`."""

    @abstractmethod
    def decoded(self) -> tuple[mx.array, mx.array]:
        """Return float32 keys `[..., S, head_dim]` and values `[..., S, value_dim]`, as the model
        has them."""


class KeyCodec(Protocol):
    """Multiplies queries by coded keys; see `Codec`."""

    def scores(self, q: mx.array, parts: list[mx.array]) -> mx.array: ...

    def decode(self, parts: list[mx.array]) -> mx.array: ...

    def inverse_transform(self, x: mx.array) -> mx.array: ...


class ValueCodec(Protocol):
    """Multiplies weights by coded values; see `Codec`."""

    def weighted_sum(self, weights: mx.array, parts: list[mx.array]) -> mx.array: ...

    def decode(self, parts: list[mx.array]) -> mx.array: ...

    def inverse_transform(self, x: mx.array) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class ValuesInKeys:
    """Reads values that are the starts of coded keys. Implements `ValueCodec`."""

    codec: ValueCodec
    value_dim: int

    def weighted_sum(self, weights: mx.array, parts: list[mx.array]) -> mx.array:
        return self.codec.weighted_sum(weights, parts)

    def decode(self, parts: list[mx.array]) -> mx.array:
        return self.codec.decode(parts)

    def inverse_transform(self, x: mx.array) -> mx.array:
        return self.codec.inverse_transform(x)[..., : self.value_dim]


@dataclass(frozen=True, slots=True)
class CodedReader(BlockReader):
    """The codes of some blocks, read by their codecs."""

    key_codec: KeyCodec
    value_codec: ValueCodec
    keys: list[mx.array]
    values: list[mx.array]

    def scores(self, q: mx.array) -> mx.array:
        return self.key_codec.scores(q, self.keys)

    def weighted_sum(self, weights: mx.array) -> mx.array:
        coded = self.value_codec.weighted_sum(weights, self.values)
        return self.value_codec.inverse_transform(coded)

    def decoded(self) -> tuple[mx.array, mx.array]:
        keys, values = self.key_codec.decode(self.keys), self.value_codec.decode(self.values)
        return self.key_codec.inverse_transform(keys), self.value_codec.inverse_transform(values)


@dataclass(frozen=True, slots=True, eq=False)
class CodedLayout:
    """How a store's blocks hold codes. Made once a store; part of kernels' keys.

    Attributes:
        by_channel: whether a vector of keys is a channel of a block, not a token.
        key_rotation: rotation of queries, see `PackedStore.transform`; None without one.
        value_rotation: rotation undone in sums of values, see `PackedStore.inverse_transform`; None
            without one.
    """

    key_bits: int
    value_bits: int
    codebook: bool
    by_channel: bool
    key_rotation: VectorRotation | None
    value_rotation: VectorRotation | None


@dataclass(frozen=True, slots=True)
class CodedArrays:
    """A store's codes as a kernel reads them.

    Attributes:
        keys, values: codes `[rows, vectors, size * bits / 32]`, scales, and biases, float16; With a
            codebook there is one scale a vector, and levels, float32 `[2 ** bits]`, in place of
            biases. The same arrays serve both if values start their keys.
    """

    keys: list[mx.array]
    values: list[mx.array]
    layout: CodedLayout


class LayerStore(ABC):
    """One layer's blocks in one format. Owned by its group's pool; only the executor writes to it.

    A store starts without blocks; `resize` adds some. Arrays have `kv_heads` rows a block: `[blocks
    * kv_heads, ...]`.
    """

    has_tail: ClassVar[bool] = False
    """Whether only full blocks are coded, and the last, partly filled block is kept uncoded in a
    pool of its own.
    """

    def __init__(self, shape: LayerShape, format: KVFormat) -> None:
        self.shape = shape
        self.format = format

    @property
    def packed(self) -> PackedStore | None:
        """The store itself if blocks are coded; else None. Then `arrays` is keys, and values unless
        part of the keys.
        """
        return None

    @classmethod
    @abstractmethod
    def block_bytes(cls, shape: LayerShape, format: KVFormat) -> int:
        """Return the bytes of one block of this layer, with scales and all else."""

    @classmethod
    def tail_bytes(cls, shape: LayerShape, format: KVFormat) -> int:
        """Return the bytes of one tail block of this layer; 0 in formats without."""
        return 0

    @property
    @abstractmethod
    def block_arrays(self) -> tuple[list[mx.array], ...]:
        """Lists of the arrays that hold blocks, without tails. `resize` replaces their entries."""

    def own_tails(self) -> list[mx.array]:
        """Return the arrays of the tail pool; none in formats without tails."""
        tails = self.lists[len(self.block_arrays) :]
        return [array for arrays in tails for array in arrays]

    @property
    def lists(self) -> tuple[list[mx.array], ...]:
        """Lists of the arrays that hold blocks, tails included. They are always the same lists."""
        return self.block_arrays

    def resize(
        self, capacity: int, moves: tuple[tuple[int, int], ...], room: Room = ANY_ROOM
    ) -> None:
        """Move blocks (from id, to id), then cut or extend the arrays to `capacity` blocks."""
        for arrays in self.block_arrays:
            resize(arrays, self.shape.kv_heads, capacity, moves=moves, room=room)

    def resize_tails(
        self, capacity: int, moves: tuple[tuple[int, int], ...], room: Room = ANY_ROOM
    ) -> None:
        """Do the same for tail blocks."""
        raise NotImplementedError(f"the format {self.format.scheme} has no tails")

    @abstractmethod
    def write(self, k: mx.array, v: mx.array, slots: SlotMapping) -> WrittenBlocks | None:
        """Store keys `[T, kv_heads, head_dim]` and values `[T, kv_heads, value_dim]`.

        Returns:
            In formats with tails, the blocks that sequences with several rows wrote, if there are
            any.
        """

    def arrays(self) -> list[mx.array]:
        """Return the arrays that hold the blocks, tails included."""
        return [array for arrays in self.lists for array in arrays]

    def place(self, slots: SlotMapping) -> None:
        """Make the arrays of `slots` that `write` reads for sequences with one row."""
        _ = slots.head_rows, slots.head_offsets

    def export(self, blocks: Ints) -> list[mx.array]:
        """Return the (lazy) contents of blocks, for storing elsewhere or copying."""
        rows = block_rows(blocks, self.shape.kv_heads)
        return [array[rows] for arrays in self.block_arrays for array in arrays]

    def restore(self, blocks: Ints, contents: list[mx.array]) -> None:
        """Write contents that `export` returned into blocks."""
        rows = block_rows(blocks, self.shape.kv_heads)
        own = [array for arrays in self.block_arrays for array in arrays]
        for array, content in zip(own, contents, strict=True):
            array[rows] = content


class PackedStore(LayerStore):
    """A store whose blocks are coded; attention multiplies the codes directly."""

    @property
    def packed(self) -> PackedStore | None:
        return self

    def transform(self, q: mx.array) -> mx.array:
        """Return queries `[..., head_dim]` in the coordinates of the coded keys."""
        return q

    @abstractmethod
    def read(self, rows: mx.array) -> BlockReader:
        """Return the full blocks in rows `[..., P]` of the arrays; S is `P * block_size`."""

    @abstractmethod
    def coded(self) -> CodedArrays:
        """Return the arrays of codes, for kernels."""

    @abstractmethod
    def inverse_transform(self, x: mx.array) -> mx.array:
        """Return sums of coded values `[..., size]` in the model's coordinates, `[...,
        value_dim]`.
        """

    def tail_arrays(self) -> tuple[mx.array, mx.array]:
        """Return the keys and values of the tail pool, `[tails * kv_heads, block_size, dim]`."""
        raise NotImplementedError(f"the format {self.format.scheme} has no tails")

    def tails(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values of the tails in rows `[...]` of the tail pool, uncoded."""
        raise NotImplementedError(f"the format {self.format.scheme} has no tails")
