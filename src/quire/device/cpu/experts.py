"""Mixtures of experts by the compiled kernels."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import mlx.core as mx

from quire.device.cpu.matrices import known_scales
from quire.device.mixture import Router
from quire.device.operations import UnfusedOperations
from quire.device.weights import ExpertMatrices, GatedExperts, PlainExperts


class KernelExperts(UnfusedOperations):
    """Multiplies float32 rows by their experts' matrices. A row's bits do not depend on other
    rows.
    """

    _ops: Any

    def experts(
        self, x: mx.array, chosen: mx.array, weights: mx.array, experts: GatedExperts | PlainExperts
    ) -> mx.array:
        if x.dtype != mx.float32:
            return super().experts(x, chosen, weights, experts=experts)
        up = self.expert_product(x, chosen, experts.up)
        if isinstance(experts, PlainExperts):
            inner = self.activate(experts.activation, up)
        else:
            inner = self.gated(experts.gating, self.expert_product(x, chosen, experts.gate), up)
        return self.weighted_sum(self.expert_product(inner, chosen, experts.down), weights)

    def route(
        self,
        logits: mx.array,
        correction: mx.array | None,
        per_expert: mx.array | None,
        router: Router,
    ) -> tuple[mx.array, mx.array]:
        routing = router.routing
        given = (logits, correction, per_expert)
        if routing is None or not all(each is None or each.dtype == mx.float32 for each in given):
            return super().route(logits, correction, per_expert, router=router)
        chosen, weights = self._ops.route(*given, **asdict(routing))
        return chosen, weights

    def weighted_sum(self, x: mx.array, weights: mx.array) -> mx.array:
        if x.dtype != mx.float32:
            return super().weighted_sum(x, weights)
        y: mx.array = self._ops.mix(x, weights.astype(mx.float32))
        return y

    def expert_product(self, x: mx.array, chosen: mx.array, matrices: ExpertMatrices) -> mx.array:
        weight = matrices.weight
        known = isinstance(weight, mx.array) or known_scales(weight)
        if x.dtype != mx.float32 or not known:
            return super().expert_product(x, chosen, matrices)
        if isinstance(weight, mx.array):
            plain: mx.array = self._ops.expert_product(x, chosen, weight, offsets=matrices.bias)
            return plain
        packing = weight.packing
        packed: mx.array = self._ops.expert_product(
            x,
            chosen,
            weight.codes,
            weight.scales,
            weight.biases,
            matrices.bias,
            group_size=packing.group_size,
            bits=packing.bits,
            mode=packing.mode,
            tiled=weight.tiled,
        )
        return packed
