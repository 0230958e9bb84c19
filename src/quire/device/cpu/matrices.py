"""Converts matrices for the extension of CPU kernels."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from quire.device.weights import FP8, HeadPart, Matrix, PackedWeight

FLOATS = (mx.float32, mx.bfloat16)
_SCALES = (*FLOATS, mx.float16)


def known_scales(weight: PackedWeight) -> bool:
    """Whether kernels support scales of this type."""
    scales = {"affine": _SCALES, FP8: (mx.float32,)}.get(weight.packing.mode, (mx.uint8,))
    return weight.scales.dtype in scales


class Matrices:
    """The extension's forms of matrices, made once each, for as long as their layer lives."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self._made: WeakKeyDictionary[Matrix, Any] = WeakKeyDictionary()
        self._parts: WeakKeyDictionary[HeadPart, Any] = WeakKeyDictionary()

    def of(self, matrix: Matrix) -> Any:
        """Return the extension's matrix; None if no kernel supports it."""
        if matrix not in self._made:
            self._made[matrix] = self._make(matrix.weight, matrix.bias)
        return self._made[matrix]

    def part(self, part: HeadPart) -> Any:
        """Return the extension's matrix of a part of `Operations.heads`; None if no kernel supports
        it.
        """
        if part not in self._parts:
            self._parts[part] = self._make_part(part)
        return self._parts[part]

    def _make(self, weight: mx.array | PackedWeight, bias: mx.array | None) -> Any:
        if isinstance(weight, mx.array):
            return self._ops.Matrix(weight, offsets=bias) if weight.dtype in FLOATS else None
        if not known_scales(weight):
            return None
        packing, tensors = weight.packing, (weight.codes, weight.scales, weight.biases, bias)
        return self._ops.Matrix(
            *tensors, packing.group_size, packing.bits, packing.mode, weight.tiled
        )

    def _make_part(self, part: HeadPart) -> Any:
        matrix = None
        if part.matrix is not None:
            matrix = self.of(part.matrix)
            if matrix is None:
                return None
        return self._ops.HeadPart(matrix, part.heads, part.normed, part.rotated, part.norm)
