"""Normalisation, in few operations on every device: RMS (arXiv:1910.07467) and LayerNorm.

GPUs have a fused kernel. On a CPU MLX spells `mx.fast.rms_norm` out in ten operations; here they
are seven: models with many small norms (Gemma) spend a good part of a step there.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from quire.device.device import current_device
from quire.models.base import Module

Norm = Callable[[mx.array], mx.array]


def _normalised(x: mx.array, share: mx.array, eps: mx.array) -> mx.array:
    wide = x.astype(mx.float32)
    scale = mx.rsqrt(mx.square(wide).sum(axis=-1, keepdims=True) * share + eps)
    return (wide * scale).astype(x.dtype)


def _constants(dim: int, eps: float) -> tuple[mx.array, mx.array]:
    """As arrays, because MLX makes one of a number in every call."""
    share, epsilon = mx.array(1.0 / dim), mx.array(eps)
    mx.eval(share, epsilon)
    return share, epsilon


def unweighted_norm(dim: int, eps: float) -> Norm:
    """`x / rms(x)` over a last axis of `dim` elements."""
    if current_device().fuses:
        return lambda x: mx.fast.rms_norm(x, None, eps)
    share, epsilon = _constants(dim, eps)
    return lambda x: _normalised(x, share, epsilon)


class LayerNorm(Module):
    """Centred and scaled over the last axis (arXiv:1607.06450).

    Parameters: weight of `shape`, and bias if it has one. A weight of two axes is one a head.
    """

    def __init__(self, shape: tuple[int, ...], eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = mx.ones(shape)
        self._eps = eps
        if bias:
            self.bias = mx.zeros(shape)

    def __call__(self, x: mx.array) -> mx.array:
        """`[..., *shape]` -> the same."""
        bias = self.get("bias")
        if self.weight.ndim == 1:
            return mx.fast.layer_norm(x, self.weight, bias, self._eps)
        y = mx.fast.layer_norm(x, None, None, self._eps) * self.weight
        return y if bias is None else y + bias


class RMSNorm(Module):
    """`x / rms(x) * weight` over the last axis. Parameter: weight `[dim]`."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((dim,))
        self._eps = eps
        self._fused = current_device().fuses
        self._constants = _constants(dim, eps)

    def __call__(self, x: mx.array) -> mx.array:
        """`[..., dim]` -> the same."""
        if self._fused:
            return mx.fast.rms_norm(x, self.weight, self._eps)
        share, eps = self._constants
        return _normalised(x, share, eps) * self.weight
