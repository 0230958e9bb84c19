"""The operations of CUDA devices: own kernels in place of MLX's where they are faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from quire.device.activations import Gating
from quire.device.coding import Chunks, CodedChunks, VectorCoding
from quire.device.cuda import packed
from quire.device.cuda.blocks import BlockEncoder
from quire.device.cuda.delta_rule import DeltaRules
from quire.device.cuda.encoding import Encoder
from quire.device.cuda.extension import find_extension
from quire.device.cuda.products import MOST_ROWS, Products
from quire.device.operations import SpelledOutOperations
from quire.device.recurrence import DeltaGates
from quire.device.weights import (
    ExpertMatrices,
    GatedExperts,
    GatedMatrices,
    Matrix,
    PackedWeight,
    PlainExperts,
)

_UNPACKED_BYTES = 128 << 20
"""Most bytes of a matrix unpacked at a time: a whole output head would take gigabytes."""
_COMPILED_FROM = 8
"""Rows from which on MLX compiles a product by codes."""
_PIECES, _FEWEST_PIECES = 128, 16
"""Number of pieces in which a row's greatest logit is searched side by side."""


class CUDAOperations(SpelledOutOperations):
    """Operations with own products of packed weights on tensor cores.

    MLX 0.32.4 compiles its products by codes of 8 rows and more at first use, half a minute for
    each of many kernels, and what `mx.compile` joins, 5 s for each function. Neither is used:
    graphs compute nearly all steps, and first starts would wait.
    """

    # As all by which rows are gathered: a GPU compiles a gather for each type.
    index_type = mx.int32
    # MLX 0.32.4 gave wrong results from 66 pairs of row and expert on (H100, float32; equal to
    # 3e-7 below that).
    gather_mm_dtypes = ()

    def __init__(self) -> None:
        self._products = Products()
        self._delta_rules = DeltaRules()
        self._encoder = Encoder()
        self._blocks = BlockEncoder(self._encoder)

    def best(self, logits: mx.array) -> mx.array:
        # MLX 0.32.4 gives a row to one thread block: 0.2 ms for 32 rows of 128,256 logits.
        rows, vocabulary = logits.shape
        pieces = math.gcd(vocabulary, _PIECES)
        if rows == 1 or pieces < _FEWEST_PIECES:
            return super().best(logits)
        parts = logits.reshape(rows, pieces, -1)
        piece = mx.argmax(parts.max(axis=-1), axis=-1, keepdims=True)
        part = self.of_rows(parts, piece).squeeze(1)
        place = piece.squeeze(1) * part.shape[-1] + mx.argmax(part, axis=-1)
        return place.astype(mx.int32)

    def packed_linear(self, x: mx.array, weight: PackedWeight, bias: mx.array | None) -> mx.array:
        if x.size // x.shape[-1] > MOST_ROWS:
            return self._by_numbers(x, weight, bias)
        y = self._products.linear(x, weight)
        if y is not None:
            return y if bias is None else y + bias
        if _mlx_multiplies(weight, x.size // x.shape[-1]):
            return super().packed_linear(x, weight, bias)
        return self._by_numbers(x, weight, bias)

    def by_head(self, x: mx.array, matrices: ExpertMatrices) -> mx.array:
        weight = matrices.weight
        rows = x.shape[0] * x.shape[1]
        if isinstance(weight, PackedWeight) and not _mlx_multiplies(weight, rows):
            matrices = replace(matrices, weight=weight.unpacked(x.dtype))
        return super().by_head(x, matrices)

    def gated_mlp(self, x: mx.array, mlp: GatedMatrices) -> mx.array:
        gate, up = (_alone(each) for each in (mlp.gate, mlp.up))
        inner = None
        if gate is not None and up is not None and x.ndim == 2 and mlp.gating.plain:
            inner = self._products.gated(x, gate, up, activation=mlp.gating.activation)
        return super().gated_mlp(x, mlp) if inner is None else self.product(inner, mlp.down)

    def _by_numbers(self, x: mx.array, weight: PackedWeight, bias: mx.array | None) -> mx.array:
        """Compute `packed_linear` by a matrix that is unpacked first, a part at a time."""
        outputs = weight.codes.shape[0]
        part = max(1, _UNPACKED_BYTES // (x.shape[-1] * x.dtype.size))
        found = []
        for first in range(0, outputs, part):
            codes = weight.span(first, first + part) if part < outputs else weight
            own = None if bias is None else bias[first : first + part]
            found.append(self.linear(x, self._unpacked(codes, x.dtype), own))
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=-1)

    def _unpacked(self, weight: PackedWeight, dtype: mx.Dtype) -> mx.array:
        numbers = self._products.unpacked(weight, dtype)
        return weight.unpacked(dtype) if numbers is None else numbers

    def gated(self, gating: Gating, x: mx.array, y: mx.array) -> mx.array:
        joined = self._products.gate(gating.activation, x, y) if gating.plain else None
        return super().gated(gating, x, y) if joined is None else joined

    def gated_delta(
        self, mixed: mx.array, gates: DeltaGates, state: mx.array, key_heads: int, eps: float
    ) -> tuple[mx.array, mx.array]:
        found = self._delta_rules.advance(mixed, gates, state, key_heads=key_heads, eps=eps)
        if found is not None:
            return found
        return super().gated_delta(mixed, gates, state, key_heads=key_heads, eps=eps)

    def of_rows(self, x: mx.array, numbers: mx.array) -> mx.array:
        # MLX compiles 4 s for each pair of types that it takes along an axis; this kernel it needs
        # for other things too.
        rows, count = x.shape[:2]
        starts = mx.arange(0, rows * count, count, dtype=mx.int32)[:, None]
        return x.flatten(0, 1)[numbers.astype(mx.int32) + starts]

    def write_rows(self, pool: mx.array, values: mx.array, rows: mx.array) -> None:
        if (extension := find_extension()) is not None:
            extension.renew(pool)
        super().write_rows(pool, values, rows)

    def encode(
        self, vectors: Sequence[mx.array], codings: Sequence[VectorCoding]
    ) -> list[mx.array] | None:
        return self._encoder.encode(vectors, codings)

    def code_blocks(self, chunks: Chunks, codings: Sequence[VectorCoding]) -> CodedChunks | None:
        return self._blocks.code(chunks, codings)

    def expert_outputs(
        self, x: mx.array, chosen: mx.array, experts: GatedExperts | PlainExperts
    ) -> mx.array:
        y = self._gated_outputs(x, chosen, experts)
        if y is not None:
            return y
        if not all(self._multiplies(each, x.dtype) for each in experts.matrices):
            return super().expert_outputs(x, chosen, experts)
        inner = self.expert_product(x, chosen, experts.up)
        if isinstance(experts, PlainExperts):
            inner = self.activate(experts.activation, inner)
        else:
            gate = self.expert_product(x, chosen, experts.gate)
            inner = self.gated(experts.gating, gate, inner)
        return self.expert_product(inner, chosen, experts.down)

    def expert_product(self, x: mx.array, chosen: mx.array, matrices: ExpertMatrices) -> mx.array:
        weight, bias = matrices.weight, matrices.bias
        if isinstance(weight, mx.array) or not self._multiplies(matrices, x.dtype):
            return super().expert_product(x, chosen, matrices)
        y = packed.expert_product(x, chosen, weight)
        return y if bias is None else y + bias[chosen]

    def _multiplies(self, matrices: ExpertMatrices, dtype: mx.Dtype) -> bool:
        weight = matrices.weight
        return isinstance(weight, PackedWeight) and self._products.multiplies_experts(weight, dtype)

    def _gated_outputs(
        self, x: mx.array, chosen: mx.array, experts: GatedExperts | PlainExperts
    ) -> mx.array | None:
        """Return the experts' outputs `[T, k, hidden]` by kernels; None if these do not support the
        case.
        """
        if isinstance(experts, PlainExperts) or not experts.gating.plain:
            return None
        gate, up, down = (_alone(each) for each in (experts.gate, experts.up, experts.down))
        if gate is None or up is None or down is None:
            return None
        return self._products.experts(
            x, chosen, (gate, up, down), activation=experts.gating.activation
        )


def _mlx_multiplies(weight: PackedWeight, rows: int) -> bool:
    """Return whether MLX's product by codes is right and compiled.

    On Hopper, MLX 0.32.4 multiplies by matrices whose rows are one group of columns with a kernel
    of their own. Its results were wrong on an H100 (64 columns, relative error 1).
    """
    return rows < _COMPILED_FROM and weight.scales.shape[-1] > 1


def _alone(matrix: Matrix | ExpertMatrices) -> PackedWeight | None:
    """Return the weight if it is packed and has no bias; else None."""
    weight = matrix.weight
    return weight if isinstance(weight, PackedWeight) and matrix.bias is None else None
