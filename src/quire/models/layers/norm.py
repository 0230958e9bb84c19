"""Normalisation: RMS (arXiv:1910.07467) and LayerNorm (arXiv:1607.06450)."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from quire.device.collectives import summed
from quire.device.device import current_device
from quire.device.ranks import Part
from quire.models.base import Module

Norm = Callable[[mx.array], mx.array]


def unweighted_norm(eps: float) -> Norm:
    """Return a function that computes `x / rms(x)` over the last axis."""
    return lambda x: current_device().operations.rms_norm(x, weight=None, eps=eps)


class UnweightedNorm(Module):
    """Computes `x / rms(x)` over the last axis. It has no parameters."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self._norm = unweighted_norm(eps)

    def __call__(self, x: mx.array) -> mx.array:
        """`[..., dim]` -> the same."""
        return self._norm(x)


class LayerNorm(Module):
    """Layer norm over the last axis.

    Parameters: weight of `shape`, and a bias of the same shape if `bias`. A weight of two axes has
    one row per head.
    """

    def __init__(self, shape: tuple[int, ...], eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = mx.ones(shape)
        self._eps = eps
        if bias:
            self.bias = mx.zeros(shape)

    def __call__(self, x: mx.array) -> mx.array:
        """`[..., *shape]` -> the same."""
        bias, operations = self.get("bias"), current_device().operations
        if self.weight.ndim == 1:
            return operations.layer_norm(x, self.weight, bias, eps=self._eps)
        y = operations.layer_norm(x, weight=None, bias=None, eps=self._eps) * self.weight
        return y if bias is None else y + bias


class RMSNorm(Module):
    """Computes `x / rms(x) * weight` over the last axis. Parameter: weight `[dim]`."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((dim,))
        self._eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """`[..., dim]` -> the same."""
        return current_device().operations.rms_norm(x, self.weight, self._eps)

    def added(self, x: mx.array, y: mx.array, factor: mx.array | None = None) -> mx.array:
        """Return `x + norm(y)`, times `factor` `[1]` if given; both are `[..., dim]`."""
        return current_device().operations.add_rms_norm(
            x, y, self.weight, eps=self._eps, factor=factor
        )


class RankNorm(Module):
    """A norm over an axis of which each rank has a part, in float32.

    Parameters: weight `[dim]` of this rank's part, and bias if it has one.

    Args:
        groups: number of norms, each over the parts of as many ranks.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        part: Part,
        *,
        groups: int = 1,
        centred: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.weight = mx.ones(dim)
        self._eps, self._centred, self._groups = eps, centred, groups
        self._part, self._own = part, part.within(groups)
        self._count = dim * part.size // groups
        if bias:
            self.bias = mx.zeros(dim)

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, dim]` -> the same."""
        wide = x.astype(mx.float32)
        if self._centred:
            wide = wide - self._mean(wide)
        y = (wide * mx.rsqrt(self._mean(mx.square(wide)) + self._eps)).astype(x.dtype)
        bias = self.get("bias")
        return y * self.weight if bias is None else y * self.weight + bias

    def _mean(self, x: mx.array) -> mx.array:
        """Return the mean over the own group's ranks, `[T, 1]`."""
        own = self._own
        around = [(0, 0), (own.start, self._groups - own.stop)]
        sums = summed(mx.pad(x.sum(axis=-1, keepdims=True), around), self._part)  # [T, groups]
        return sums[:, own.start : own.stop] / self._count
