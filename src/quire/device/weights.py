"""Weights in the forms that a device's operations take: matrices, codes, heads and experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from quire.device.activations import Gating

FP8 = "fp8"
"""Mode of E4M3 codes with a float32 scale for each group of a row's columns."""
FP4 = "fp4"
"""Mode of E2M1 codes with a scale in float32 or bfloat16 for each 16 columns of a row."""
DECODED_MODES = (FP8, FP4)
"""Modes in which MLX has no products."""
_ONE = 0x38
"""1 in E4M3."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How codes are packed, in MLX's terms.

    Attributes:
        mode: "affine", "mxfp4", "mxfp8" or "nvfp4"; or `FP8` or `FP4`, which MLX does not have.
    """

    group_size: int
    bits: int
    mode: str


def random_codes(shape: tuple[int, ...], key: mx.array | None = None) -> mx.array:
    """Return words of random codes, all of them equally frequent: uint32.

    A draw of 32 bits at once would not be: MLX rounds it to float32, whose lowest bits are 0.
    """
    high, low = mx.random.randint(0, 1 << 16, (2, *shape), dtype=mx.uint32, key=key)
    return high << 16 | low


TILE = 16
"""Number of a matrix's outputs whose codes are stored together."""


def in_tiles(matrix: mx.array) -> mx.array:
    """Return `[..., out, n]` stored in the memory order of `[..., out / TILE, n, TILE]`."""
    tiles = matrix.reshape(-1, TILE, matrix.shape[-1]).swapaxes(1, 2)
    return mx.contiguous(tiles).reshape(matrix.shape)


def untiled(matrix: mx.array) -> mx.array:
    """Undo `in_tiles`."""
    return matrix.reshape(-1, matrix.shape[-1], TILE).swapaxes(1, 2).reshape(matrix.shape)


def _rows(matrix: mx.array, numbers: mx.array, tiled: bool) -> mx.array:
    if not tiled:
        return matrix[numbers]
    tiles = matrix.reshape(-1, matrix.shape[-1], TILE)
    return tiles[numbers // TILE, :, numbers % TILE]


def _scaled(numbers: mx.array, scales: mx.array) -> mx.array:
    """Multiply the groups of each row by their scales `[..., groups]`."""
    groups = numbers.reshape(*scales.shape, -1) * scales[..., None]
    return groups.reshape(numbers.shape)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed matrix: codes `[..., out, in * bits / 32]`, scales, and biases if the mode is
    affine.

    Attributes:
        tiled: each array's memory is in the order of `[..., out / TILE, -, TILE]`: the data of
            `TILE` neighbouring outputs are contiguous, as some kernels need.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array | None
    packing: Packing
    tiled: bool = False

    def by_rows(self) -> PackedWeight:
        """Return the same weight without tiles."""
        return self._relaid(untiled) if self.tiled else self

    def rows(self, numbers: mx.array) -> PackedWeight:
        """Return the rows `[T]` of a matrix."""
        return self._relaid(lambda array: _rows(array, numbers, self.tiled))

    def span(self, first: int, last: int) -> PackedWeight:
        """Return rows `[first, last)` of a matrix without tiles."""
        return self._relaid(lambda array: array[first:last])

    def _relaid(self, lay: Callable[[mx.array], mx.array]) -> PackedWeight:
        biases = None if self.biases is None else lay(self.biases)
        return PackedWeight(lay(self.codes), lay(self.scales), biases, packing=self.packing)

    def _numbers(self) -> mx.array:
        """Return the codes of `DECODED_MODES` as numbers without scales, in float32."""
        if self.packing.mode == FP8:
            return mx.from_fp8(self.codes.view(mx.uint8), mx.float32)
        ones = mx.full(self.scales.shape, _ONE, dtype=mx.uint8)
        found = mx.dequantize(self.codes, ones, group_size=16, bits=4, mode="nvfp4")
        return found.astype(mx.float32)

    def unpacked(self, dtype: mx.Dtype | None = None) -> mx.array:
        """Return the matrix unpacked, `[..., out, in]`.

        Args:
            dtype: the scales' unless said otherwise; bfloat16 of float codes.
        """
        if self.tiled:
            return self.by_rows().unpacked(dtype)
        if self.packing.mode in DECODED_MODES:
            return _scaled(self._numbers(), self.scales).astype(dtype or mx.bfloat16)
        scales, biases = self.scales, self.biases
        if biases is not None and dtype is not None:
            scales, biases = scales.astype(dtype), biases.astype(dtype)
        return mx.dequantize(
            self.codes,
            scales,
            biases,
            group_size=self.packing.group_size,
            bits=self.packing.bits,
            mode=self.packing.mode,
            dtype=dtype,
        )


@dataclass(frozen=True, slots=True, eq=False)
class JoinedMatrix:
    """Matrices that multiply the same rows, stored one below the other.

    Attributes:
        weight: `[out of all, in]`, or codes.
        bias: `[out of all]`.
        ends: outputs up to the end of each matrix.
    """

    weight: mx.array | PackedWeight
    bias: mx.array | None
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Matrix:
    """The weight and bias of a linear layer. One object per layer: kernels cache by it.

    Attributes:
        weight: `[out, in]`, or codes.
        bias: `[out]`.
        joined: the matrix whose rows include this one's, where the device joins products.
    """

    weight: mx.array | PackedWeight
    bias: mx.array | None
    joined: JoinedMatrix | None = None


def joined_by(matrices: Sequence[Matrix]) -> JoinedMatrix | None:
    """Return the joined matrix that consists of these matrices, in this order; None if there is
    none.
    """
    joined = matrices[0].joined
    if joined is None or len(matrices) != len(joined.ends):
        return None
    return joined if all(each.joined is joined for each in matrices) else None


@dataclass(frozen=True, slots=True)
class GatedMatrices:
    """The matrices of `down(gating(gate(x), up(x)))`."""

    gate: Matrix
    up: Matrix
    down: Matrix
    gating: Gating


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HeadPart:
    """How a layer makes its queries, its keys or its values; made once a layer.

    Attributes:
        matrix: whose product is cut into heads; None takes the product of the part before.
        norm: weight `[dim]` of the RMS norm of each head, if it has one.
        normed: whether heads are normalised.
        rotated: whether they are rotated then, where the layer rotates.
    """

    matrix: Matrix | None
    heads: int
    norm: mx.array | None = None
    normed: bool = False
    rotated: bool = False


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """A matrix per expert, `[experts, out, in]` or codes, and an optional bias `[experts, out]`."""

    weight: mx.array | PackedWeight
    bias: mx.array | None

    @property
    def array(self) -> mx.array:
        """The weights or their codes, whose identity names the matrices."""
        return self.weight if isinstance(self.weight, mx.array) else self.weight.codes


@dataclass(frozen=True, slots=True)
class GatedExperts:
    """The matrices of each expert's `down(gating(gate(x), up(x)))`."""

    gate: ExpertMatrices
    up: ExpertMatrices
    down: ExpertMatrices
    gating: Gating

    @property
    def matrices(self) -> tuple[ExpertMatrices, ...]:
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """The matrices of each expert's `down(activation(up(x)))`, and the activation's name."""

    up: ExpertMatrices
    down: ExpertMatrices
    activation: str

    @property
    def matrices(self) -> tuple[ExpertMatrices, ...]:
        return self.up, self.down
