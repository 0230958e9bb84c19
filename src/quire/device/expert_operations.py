"""Operations of mixtures of experts, in MLX. A device with better kernels overrides them."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from quire.device.cache_operations import CacheOperations
from quire.device.mixture import ElementwiseOperations, mixed, outputs, product
from quire.device.weights import ExpertMatrices, GatedExperts, PlainExperts


class ExpertOperations(CacheOperations):
    """Products of rows with the matrices of their experts."""

    def experts(
        self, x: mx.array, chosen: mx.array, weights: mx.array, experts: GatedExperts | PlainExperts
    ) -> mx.array:
        """Return the weighted sum of each row's chosen experts, in the dtype of `x`.

        Args:
            x: `[T, hidden]`.
            chosen: `[T, k]`, indices of experts.
            weights: `[T, k]`.

        Returns:
            `[T, hidden]`.
        """
        return self.weighted_sum(self.expert_outputs(x, chosen, experts), weights)

    def expert_outputs(
        self, x: mx.array, chosen: mx.array, experts: GatedExperts | PlainExperts
    ) -> mx.array:
        """Return what each row's chosen experts make of it: `[T, k, hidden]`."""
        return outputs(cast("ElementwiseOperations", self), x, chosen, experts=experts)

    def weighted_sum(self, x: mx.array, weights: mx.array) -> mx.array:
        """Return the weighted sum `[T, hidden]` of experts' outputs `[T, k, hidden]`."""
        return mixed(x, weights, x.dtype)

    def expert_product(self, x: mx.array, chosen: mx.array, matrices: ExpertMatrices) -> mx.array:
        """Multiply rows `[T, in]` or `[T, k, in]` by their experts `[T, k]`: `[T, k, out]`."""
        rows = x[:, None, None] if x.ndim == 2 else x[:, :, None]
        found = product(
            cast("ElementwiseOperations", self), rows, chosen, matrices=matrices, ordered=False
        )
        return found.squeeze(-2)
