"""Operations of models that references compute with."""

from __future__ import annotations

import mlx.core as mx

from quire.device.operations import UnfusedOperations
from quire.device.weights import ExpertMatrices, GatedExperts, PackedWeight, PlainExperts


class PreciseOperations(UnfusedOperations):
    """Products in float32 of weights that are unpacked first.

    On a CPU MLX's products in bfloat16 are off by some hundredths. On CUDA those by codes take half
    a minute each to compile.
    """

    def linear(self, x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        y = x.astype(mx.float32) @ weight.astype(mx.float32).T
        return (y if bias is None else y + bias).astype(x.dtype)

    def packed_linear(self, x: mx.array, weight: PackedWeight, bias: mx.array | None) -> mx.array:
        return self.linear(x, weight.unpacked(mx.float32), bias)

    def by_head(self, x: mx.array, matrices: ExpertMatrices) -> mx.array:
        weight = matrices.weight
        numbers = weight.unpacked(mx.float32) if isinstance(weight, PackedWeight) else weight
        rows = x.swapaxes(0, 1).astype(mx.float32)
        return (rows @ numbers.astype(mx.float32).swapaxes(-1, -2)).swapaxes(0, 1).astype(x.dtype)

    def expert_outputs(
        self, x: mx.array, chosen: mx.array, experts: GatedExperts | PlainExperts
    ) -> mx.array:
        def product(rows: mx.array, matrices: ExpertMatrices) -> mx.array:
            assert isinstance(matrices.weight, PackedWeight)
            matrix = matrices.weight.unpacked(mx.float32)[chosen]
            y = (rows.astype(mx.float32) @ matrix.swapaxes(-1, -2)).astype(x.dtype)
            return y if matrices.bias is None else y + matrices.bias[chosen][..., None, :]

        rows = x[:, None, None]
        up = product(rows, experts.up)
        if isinstance(experts, GatedExperts):
            inner = self.gated(experts.gating, product(rows, experts.gate), up)
        else:
            inner = self.activate(experts.activation, up)
        return product(inner, experts.down).squeeze(-2)
