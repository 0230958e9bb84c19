"""Describes how vectors of keys and values are coded, for a device's operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from quire.core.arrays import Ints


@dataclass(frozen=True, slots=True)
class VectorRotation:
    """A rotation of vectors, for kernels.

    Attributes:
        map: float32; signs `[size]`, products with which take a Hadamard transform, or a matrix
            `[size, size]`, with which vectors are multiplied from the left.
        scale: scale of the result, for the rotation and for its inverse.
        signs: float32 `[size]`, products with which take the transform of `coding.cuh`.
    """

    map: mx.array
    scale: float
    signs: mx.array

    @property
    def transform_scale(self) -> float:
        """Scale of the transform of `coding.cuh`, for the rotation and for its inverse."""
        return self.scale if self.map.ndim == 1 else self.scale * len(self.signs) ** -0.5


@dataclass(frozen=True, slots=True, eq=False)
class VectorCoding:
    """Describes how a vector becomes codes and scales: affine, or a direction by a codebook.

    Made once per codec; kernels use it as a key of what they prepare.

    Attributes:
        size: elements that are coded; shorter vectors are padded with zeros.
        group_size: elements that share a scale and a bias; a codebook has one scale, the length.
        rotation: of the vector, before it is coded.
        edges: float32 `[2 ** bits - 1]`, between the levels of a codebook; None where affine.
        reach: half the range that affine codes span, in standard deviations; 0 for all of it.
        refits: how often scale and bias are fitted to their codes by least squares.
    """

    size: int
    bits: int
    group_size: int
    rotation: VectorRotation | None = None
    edges: mx.array | None = None
    reach: float = 0.0
    refits: int = 0


@dataclass(frozen=True, eq=False)
class ChunkBlocks:
    """The blocks that chunks write to, a chunk's blocks consecutively. Equal for all layers.

    Attributes:
        starts: `[S + 1]`; blocks `[starts[s], starts[s + 1])` are chunk s's.
        tails: `[n]` the tail of each block's chunk, as a block of the tail pool.
        tail_tokens: `[n]` tokens of the block that the tail holds.
        ends: `[n]` tokens of the block up to the chunk's end.
        rows: `[n]` the row of the block's first token among the vectors; where the tail holds that
            token, the row that it would have.
        codes: `[n]` the number of the block among those that are full; -1 where it is not.
    """

    starts: Ints
    tails: Ints
    tail_tokens: Ints
    ends: Ints
    rows: Ints
    codes: Ints

    @staticmethod
    def of(rows: Ints, counts: Ints, tails: Ints, offsets: Ints, block_size: int) -> ChunkBlocks:
        """Describe the blocks that some chunks write to.

        Args:
            rows, counts: `[S]` the first row of each among the vectors, and how many it has.
            tails: `[S]` their tails.
            offsets: `[S]` tokens that these hold before the chunk.
        """
        ends = offsets + counts
        each = -(-ends // block_size)
        starts = np.concatenate([[0], np.cumsum(each)]).astype(np.int32)
        owner = np.repeat(np.arange(len(each)), each)
        # Of each block, among the tokens of its chunk's blocks.
        first = (np.arange(starts[-1]) - starts[owner]) * block_size
        own_ends = np.minimum(ends[owner] - first, block_size)
        full = own_ends == block_size
        return ChunkBlocks(
            starts,
            tails[owner],
            np.where(first == 0, offsets[owner], 0),
            ends=own_ends,
            rows=rows[owner] - offsets[owner] + first,
            codes=np.where(full, np.cumsum(full) - 1, -1),
        )

    @property
    def count(self) -> int:
        """Number of blocks, n."""
        return len(self.rows)

    @cached_property
    def full(self) -> Ints:
        """Indices of the full blocks."""
        return np.flatnonzero(self.codes >= 0).astype(np.int32)

    @cached_property
    def described(self) -> mx.array:
        """Return `[n, 5]` for kernels: `tails`, `tail_tokens`, `ends`, `rows` and `codes` of each
        block.
        """
        fields = self.tails, self.tail_tokens, self.ends, self.rows, self.codes
        return mx.array(np.stack(fields, axis=1).astype(np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Consecutive tokens of some sequences, to be appended to their tails.

    Attributes:
        tails: of keys, and values if there are any, `[tails * heads, block_size, dim]`.
        vectors: new ones, `[T, heads, dim]`; of other sequences too.
    """

    tails: Sequence[mx.array]
    vectors: Sequence[mx.array]
    blocks: ChunkBlocks


@dataclass(frozen=True, slots=True)
class CodedChunks:
    """Chunks arranged in blocks. The first block starts with the former tail.

    Attributes:
        written: keys and values, `[n, heads, block_size, dim]` each; zeros after a chunk's last
            token.
        codes: of the full blocks, codes, scales and biases of keys `[full * heads, key_dim, -]`,
            then of values `[full * heads, block_size, -]`.
    """

    written: list[mx.array]
    codes: list[mx.array]
