"""RMS normalisation (arXiv:1910.07467), in few operations on every device.

GPUs have a fused kernel. On a CPU MLX spells `mx.fast.rms_norm` out in ten operations; compiled
they are three, and models with many small norms (Gemma) spend a good part of a step there.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from quire.models.base import Module

Norm = Callable[[mx.array], mx.array]


def _normalised(x: mx.array, share: mx.array, eps: mx.array) -> mx.array:
    wide = x.astype(mx.float32)
    scale = mx.rsqrt((wide * wide).sum(axis=-1, keepdims=True) * share + eps)
    return (wide * scale).astype(x.dtype)


def _weighted(x: mx.array, weight: mx.array, share: mx.array, eps: mx.array) -> mx.array:
    return _normalised(x, share, eps) * weight


# One trace serves all shapes, so sizes come as arrays: a number would be baked in.
_compiled = mx.compile(_normalised, shapeless=True)
_compiled_weighted = mx.compile(_weighted, shapeless=True)


def unweighted_norm(dim: int, eps: float) -> Norm:
    """`x / rms(x)` over a last axis of `dim` elements."""
    if mx.default_device() != mx.cpu:
        return lambda x: mx.fast.rms_norm(x, None, eps)
    share, epsilon = mx.array(1.0 / dim), mx.array(eps)
    mx.eval(share, epsilon)
    return lambda x: _compiled(x, share, epsilon)


class RMSNorm(Module):
    """`x / rms(x) * weight` over the last axis. Parameter: weight `[dim]`."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((dim,))
        self._eps = eps
        self._cpu = mx.default_device() == mx.cpu
        self._constants = mx.array(1.0 / dim), mx.array(eps)
        mx.eval(self._constants)

    def __call__(self, x: mx.array) -> mx.array:
        """`[..., dim]` -> the same."""
        if not self._cpu:
            return mx.fast.rms_norm(x, self.weight, self._eps)
        share, eps = self._constants
        y: mx.array = _compiled_weighted(x, self.weight, share, eps)
        return y
