"""Random rotations, which spread a vector's energy evenly over its elements before rounding."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from quire.device.coding import VectorRotation
from quire.device.device import current_device

_SEED = 20250428
"""Seed of the rotation. Changing it would turn stored codes into noise."""


class Rotation:
    """An orthogonal map of vectors of `dim` elements, the same in every process.

    A power of two takes a randomised Hadamard transform. Other sizes take a random orthogonal
    matrix, because MLX 0.32's Hadamard transform is wrong on the CPU for some of
    them (72, 144, 576).

    Args:
        dim: elements of a vector.
    """

    def __init__(self, dim: int) -> None:
        rng = np.random.default_rng([_SEED, dim])
        self._fast = dim & (dim - 1) == 0
        if self._fast:
            self._map = mx.array(rng.choice(np.array([-1.0, 1.0], dtype=np.float32), dim))
        else:
            q, r = np.linalg.qr(rng.standard_normal((dim, dim)))
            self._map = mx.array((q * np.sign(np.diag(r))).astype(np.float32))

    @property
    def signs(self) -> mx.array | None:
        """The signs `[dim]` of the Hadamard transform, or None if the rotation is a matrix."""
        return self._map if self._fast else None

    def scaled(self, scale: float = 1.0) -> VectorRotation:
        """The parameters of `forward` and `back` for kernels."""
        return VectorRotation(
            self._map, scale * self._map.shape[0] ** -0.5 if self._fast else scale
        )

    def forward(self, x: mx.array, scale: float = 1.0) -> mx.array:
        """Return `[..., dim]` rotated and multiplied by `scale`, of the same type."""
        rotation = self._map.astype(x.dtype)
        if self._fast:
            return mx.hadamard_transform(x * rotation, scale * x.shape[-1] ** -0.5)
        return _times(x @ rotation, scale)

    def back(self, x: mx.array, scale: float = 1.0) -> mx.array:
        """Undo `forward` of scale 1, and multiply by `scale`."""
        rotation = self._map.astype(x.dtype)
        if self._fast:
            return mx.hadamard_transform(x, scale * x.shape[-1] ** -0.5) * rotation
        return _times(current_device().times_transposed(x, rotation), scale)


def _times(x: mx.array, scale: float) -> mx.array:
    return x if scale == 1.0 else x * scale


@cache
def rotation(dim: int) -> Rotation:
    """Return the cached rotation of a size."""
    return Rotation(dim)
