"""Operations of mixtures of experts, in MLX. A device with better kernels overrides them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx

from quire.device import mixture
from quire.device.cache_operations import CacheOperations
from quire.device.weights import ExpertMatrices, GatedExperts, PlainExperts

if TYPE_CHECKING:
    from quire.device.operations import Operations


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
        return mixture.weighted_sum(cast("Operations", self), x, chosen, weights, experts)

    def expert_product(self, x: mx.array, chosen: mx.array, matrices: ExpertMatrices) -> mx.array:
        """Multiply rows `[T, in]` or `[T, k, in]` by their experts `[T, k]`: `[T, k, out]`."""
        rows = x[:, None, None] if x.ndim == 2 else x[:, :, None]
        found = mixture.product(cast("Operations", self), rows, chosen, matrices, ordered=False)
        return found.squeeze(-2)
