"""Attention residuals (Kimi K3): each block reads a mixture of sums of the layers before it.

Outputs of `length` layers after each other add up to one sum. Rows hold the sums side by side, the
first of which is the embedding: `[T, sums * hidden]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from quire.models.base import Module
from quire.models.layers.norm import UnweightedNorm
from quire.models.layers.streams import weighted_sum


@dataclass(frozen=True)
class AttentionResiduals:
    """Description of sums of layers' outputs.

    Attributes:
        length: number of layers of a sum.
        eps: epsilon of the norm of a sum.
    """

    length: int
    eps: float

    def count(self, layers: int) -> int:
        """Return the number of sums that rows hold behind as many layers."""
        return 1 + -(-layers // self.length)

    def head(self, hidden_size: int) -> ResidualMixture:
        """Return the module that mixes the sums behind the last layer."""
        return ResidualMixture(self, hidden_size)


class ResidualMixture(Module):
    """Computes the mean of the sums, weighted by a softmax of scores.

    Parameter: weight `[1, hidden]`, whose product with a normalised sum is its score.
    """

    def __init__(self, kind: AttentionResiduals, hidden_size: int) -> None:
        super().__init__()
        self._hidden = hidden_size
        self._norm = UnweightedNorm(kind.eps)
        self.weight = mx.zeros((1, hidden_size))

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, sums * hidden]` -> `[T, hidden]`."""
        count = x.shape[-1] // self._hidden
        if count == 1:
            return x
        sums = x.reshape(x.shape[0], count, self._hidden).astype(mx.float32)
        scores = (self._norm(sums) * self.weight).sum(axis=-1)  # [T, sums]
        # A softmax from what kernels can be generated for.
        powers = mx.exp(scores - scores.max(axis=-1, keepdims=True))
        return weighted_sum(x, powers / powers.sum(axis=-1, keepdims=True))

    def added(self, x: mx.array, y: mx.array) -> mx.array:
        """Return the sums `x` with `y` added to the last one."""
        width = x.shape[-1] - self._hidden
        last = x[:, width:] + y
        return mx.concatenate([x[:, :width], last], axis=-1) if width else last
