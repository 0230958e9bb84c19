"""The operations of CPUs with the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from quire.device.cache_operations import RowCopies
from quire.device.coding import VectorCoding
from quire.device.cpu.draws import KernelDraws
from quire.device.cpu.experts import KernelExperts
from quire.device.cpu.gates import KernelGates, kernel_name
from quire.device.cpu.kernels import CPUKernels
from quire.device.cpu.matrices import FLOATS, Matrices, known_scales
from quire.device.recurrence import DeltaGates
from quire.device.rotation import Rotate
from quire.device.weights import (
    GatedMatrices,
    HeadPart,
    PackedWeight,
    Packing,
)

_MULTIPLE = 16
"""Channels and keys must be multiples of this, the kernels' longest vector."""
_MOST_TAPS = 8


class KernelOperations(KernelDraws, KernelExperts, KernelGates):
    """Operations on float32 rows by weights in float32, bfloat16 or codes. A row's bits do not
    depend on other rows.
    """

    index_type = mx.int32
    rows_in_place = True

    def __init__(self, kernels: CPUKernels) -> None:
        self.kernels = kernels
        self._ops = kernels.ops
        self._codings: dict[VectorCoding, Any] = {}
        """KV codings in the extension's form."""
        self._matrices = Matrices(kernels.ops)

    def linear(self, x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        if x.dtype != mx.float32 or weight.dtype not in FLOATS:
            return super().linear(x, weight, bias)
        y: mx.array = self._ops.product(x, weight, offsets=bias)
        return y

    def add_low_rank(
        self,
        y: mx.array,
        x: mx.array,
        numbers: mx.array,
        inner: mx.array,
        outer: mx.array,
        runs: Sequence[tuple[int, int, int]] = (),
    ) -> mx.array:
        if x.ndim != 2 or any(each.dtype != mx.float32 for each in (y, x, inner, outer)):
            return super().add_low_rank(y, x, numbers, inner=inner, outer=outer, runs=runs)
        added: mx.array = self._ops.add_low_rank(y, x, numbers, inner, outer)
        return added

    def packed_linear(self, x: mx.array, weight: PackedWeight, bias: mx.array | None) -> mx.array:
        if not _serves(x, weight):
            return super().packed_linear(x, weight, bias)
        packing = weight.packing
        y: mx.array = self._ops.product(
            x,
            weight.codes,
            weight.scales,
            weight.biases,
            bias,
            group_size=packing.group_size,
            bits=packing.bits,
            mode=packing.mode,
            tiled=weight.tiled,
        )
        return y

    def reads_tiles(self, packing: Packing) -> bool:
        reads: bool = self._ops.reads_tiles(packing.bits, packing.mode)
        return reads

    def rms_norm(self, x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        if not all(each is None or each.dtype == mx.float32 for each in (x, weight)):
            return super().rms_norm(x, weight, eps)
        y: mx.array = self._ops.rms_norm(x, weight, eps)
        return y

    def add_rms_norm(
        self,
        x: mx.array,
        y: mx.array,
        weight: mx.array,
        eps: float,
        factor: mx.array | None = None,
    ) -> mx.array:
        if not all(each is None or each.dtype == mx.float32 for each in (x, y, weight, factor)):
            return super().add_rms_norm(x, y, weight, eps=eps, factor=factor)
        added: mx.array = self._ops.rms_norm(y, weight, eps, x, factor)
        return added

    def gated_mlp(self, x: mx.array, mlp: GatedMatrices) -> mx.array:
        matrices = [self._matrices.of(each) for each in (mlp.gate, mlp.up, mlp.down)]
        name = kernel_name(mlp.gating)
        if x.dtype != mx.float32 or name is None or None in matrices:
            return super().gated_mlp(x, mlp)
        y: mx.array = self._ops.gated_mlp(x, *matrices, name)
        return y

    def heads(
        self, x: mx.array, parts: Sequence[HeadPart], eps: float, rotate: Rotate | None
    ) -> list[mx.array]:
        made = [self._matrices.part(each) for each in parts]
        known = rotate is None or isinstance(rotate, _Rotation)
        if x.dtype != mx.float32 or not known or None in made:
            return super().heads(x, parts, eps, rotate=rotate)
        angles = rotate if isinstance(rotate, _Rotation) else _NO_ROTATION
        found: list[mx.array] = self._ops.heads(
            x, made, eps, angles.cosines, angles.sines, angles.neighbours
        )
        return found

    def rotation(self, cosines: mx.array, sines: mx.array, neighbours: bool) -> Rotate:
        return _Rotation(self._ops, cosines, sines, neighbours=neighbours)

    def write_vectors(
        self,
        pools: Sequence[mx.array],
        vectors: Sequence[mx.array],
        rows: mx.array,
        offsets: mx.array,
    ) -> None:
        self._ops.write_vectors(list(pools), list(vectors), rows, offsets)

    def write_rows(self, pool: mx.array, values: mx.array, rows: mx.array) -> None:
        self._ops.write_rows(pool, values, rows)

    def copy_rows(self, copies: Sequence[RowCopies]) -> None:
        for each in copies:
            for pool in each.pools:
                self._ops.copy_rows(pool, each.sources, each.targets)

    def causal_conv(
        self, window: mx.array, taps: mx.array, bias: mx.array | None, silu: bool
    ) -> mx.array:
        channels, kernel = taps.shape
        known = channels % _MULTIPLE == 0 and kernel <= _MOST_TAPS
        if not known or any(each.dtype != mx.float32 for each in (window, taps)):
            return super().causal_conv(window, taps, bias, silu=silu)
        out: mx.array = self._ops.causal_conv(window, taps, bias, silu)
        return out

    def gated_delta(
        self, mixed: mx.array, gates: DeltaGates, state: mx.array, key_heads: int, eps: float
    ) -> tuple[mx.array, mx.array]:
        if state.shape[-1] % _MULTIPLE:
            return super().gated_delta(mixed, gates, state, key_heads=key_heads, eps=eps)
        arrays = (mixed, gates.steps, gates.betas, gates.log_rates, gates.step_biases, state)
        y, after = self._ops.gated_delta(
            *(each.astype(mx.float32) for each in arrays),
            key_heads,
            eps,
            gates.most_correction,
            gates.most_forgotten or 0.0,
        )
        return y, after

    def state_space(
        self,
        values: mx.array,
        keys: mx.array,
        queries: mx.array,
        steps: mx.array,
        rates: mx.array,
        state: mx.array,
    ) -> tuple[mx.array, mx.array]:
        size = state.shape[-1]
        if missing := -size % _MULTIPLE:  # columns of zeros stay zero and add nothing
            keys, queries, state = (_widened(each, missing) for each in (keys, queries, state))
            rates = _widened(rates, missing) if rates.ndim == 2 else rates
        y, after = self._ops.state_space(values, keys, queries, steps, rates, state)
        return y, after[..., :size] if missing else after

    def encode(
        self, vectors: Sequence[mx.array], codings: Sequence[VectorCoding]
    ) -> list[mx.array]:
        coded: list[mx.array] = self._ops.encode(
            [each.astype(mx.float32) for each in vectors], [self._coding(each) for each in codings]
        )
        return coded

    def write_codes(
        self,
        pools: Sequence[mx.array],
        vectors: Sequence[mx.array],
        codings: Sequence[VectorCoding],
        rows: mx.array,
        offsets: mx.array,
    ) -> bool:
        wide = [each.astype(mx.float32) for each in vectors]
        made = [self._coding(each) for each in codings]
        self._ops.write_codes(list(pools), wide, made, rows, offsets)
        return True

    def _coding(self, coding: VectorCoding) -> Any:
        if coding not in self._codings:
            rotation = coding.rotation
            self._codings[coding] = self._ops.VectorCoding(
                coding.size,
                coding.bits,
                coding.group_size,
                coding.edges,
                rotation and rotation.map,
                rotation.scale if rotation else 1.0,
                coding.reach,
                coding.refits,
            )
        return self._codings[coding]


@dataclass(frozen=True, slots=True)
class _Rotation:
    """The function that `Operations.rotation` returns."""

    ops: Any
    cosines: mx.array | None
    sines: mx.array | None
    neighbours: bool

    def __call__(self, x: mx.array) -> mx.array:
        wide = x.astype(mx.float32)
        rotated: mx.array = self.ops.rotate(wide, self.cosines, self.sines, self.neighbours)
        return rotated.astype(x.dtype)


_NO_ROTATION = _Rotation(ops=None, cosines=None, sines=None, neighbours=True)


def _serves(x: mx.array, weight: PackedWeight) -> bool:
    return x.dtype == mx.float32 and known_scales(weight)


def _widened(x: mx.array, columns: int) -> mx.array:
    """Append columns of zeros to the last axis."""
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, columns)])
