"""How vectors of keys and values become codes, as a device's operations are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class VectorRotation:
    """A rotation of vectors as a kernel computes it.

    Attributes:
        map: float32; signs `[size]`, products with which take a Hadamard transform, or a matrix
            `[size, size]`, with which vectors are multiplied from the left.
        scale: of the result, as of what undoes the rotation.
    """

    map: mx.array
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class VectorCoding:
    """How a vector becomes codes and scales: affine ones, or a direction by a codebook.

    Made once a codec, and a key of what kernels make of it.

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


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Consecutive tokens of a sequence, to be written behind those that its tail holds.

    Attributes:
        tails: of keys, and values if there are any, `[tails * heads, block_tokens, dim]`.
        vectors: new ones, `[T, heads, dim]`.
        rows: `[heads]` of the sequence's own tail.
        offset: tokens that it holds before the chunk.
    """

    tails: Sequence[mx.array]
    vectors: Sequence[mx.array]
    rows: mx.array
    offset: int


@dataclass(frozen=True, slots=True)
class CodedChunk:
    """A `Chunk` in blocks, which begin with what its tail held.

    Attributes:
        written: keys and values, `[n, heads, block_tokens, dim]` each; zeros behind the last token.
        codes: of the full blocks, codes, scales and biases of keys `[full * heads, key_dim, -]`,
            then of values `[full * heads, block_tokens, -]`.
    """

    written: list[mx.array]
    codes: list[mx.array]
