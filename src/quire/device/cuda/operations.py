"""The CUDA kernels in the places of MLX's operations."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quire.device.cuda.encoding import Encoder
from quire.device.cuda.products import Packed, Products
from quire.device.operations import (
    ExpertMatrices,
    GatedExperts,
    Operations,
    PackedWeight,
    VectorCoding,
)


class CUDAOperations(Operations):
    """Products of packed weights on tensor cores, where they are faster than MLX's."""

    def __init__(self) -> None:
        self._products = Products()
        self._encoder = Encoder()

    def packed_linear(self, x: mx.array, weight: PackedWeight, bias: mx.array | None) -> mx.array:
        packed = _affine(weight)
        y = None if packed is None else self._products.linear(x, packed)
        if y is None:
            return super().packed_linear(x, weight, bias)
        return y if bias is None else y + bias

    def encode(
        self, vectors: Sequence[mx.array], codings: Sequence[VectorCoding]
    ) -> list[mx.array] | None:
        found: list[mx.array] = []
        for x, coding in zip(vectors, codings, strict=True):
            parts = self._encoder.encode(x, coding)
            if parts is None:
                return None
            found += parts
        return found

    def experts(self, x: mx.array, chosen: mx.array, mlp: GatedExperts) -> mx.array | None:
        gate, up, down = (_unbiased(each) for each in (mlp.gate, mlp.up, mlp.down))
        if mlp.activation is None or gate is None or up is None or down is None:
            return None
        return self._products.experts(x, chosen, (gate, up, down), mlp.activation)


def _affine(weight: PackedWeight) -> Packed | None:
    if weight.biases is None:
        return None
    packing = weight.packing
    return Packed(weight.codes, weight.scales, weight.biases, packing.group_size, packing.bits)


def _unbiased(matrices: ExpertMatrices) -> Packed | None:
    weight = matrices.weight
    return _affine(weight) if isinstance(weight, PackedWeight) and matrices.bias is None else None
