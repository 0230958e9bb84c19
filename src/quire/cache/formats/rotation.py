"""Random rotations, which spread a vector's energy evenly over its elements before rounding."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from quire.core.arrays import Floats
from quire.device.coding import VectorRotation
from quire.device.device import current_device

_SEED = 20250428
"""Seed of the rotation. Changing it would turn stored codes into noise."""


class Rotation:
    """An orthogonal map of vectors of `dim` elements, the same in every process.

    Elements get random signs. Vectors of a power of two take a Hadamard transform. Others are an
    odd number of runs of a power of two: each run takes a Hadamard transform, then a Hartley
    transform goes across the runs. Both are one matrix, because MLX 0.32's Hadamard transform is
    wrong on the CPU for some sizes (72, 144, 576).

    Args:
        dim: elements of a vector.
    """

    def __init__(self, dim: int) -> None:
        rng = np.random.default_rng([_SEED, dim])
        self._fast = dim & (dim - 1) == 0
        signs = rng.choice(np.array([-1.0, 1.0]), dim)
        self._signs = mx.array(signs.astype(np.float32))
        self._map = self._signs if self._fast else _matrix(signs)

    @property
    def signs(self) -> mx.array:
        """The signs of the elements, `[dim]`."""
        return self._signs

    def scaled(self, scale: float = 1.0) -> VectorRotation:
        """The parameters of `forward` and `back` for kernels."""
        own = scale * self._map.shape[0] ** -0.5 if self._fast else scale
        return VectorRotation(self._map, own, self._signs)

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


def _matrix(signs: Floats) -> mx.array:
    """Return the rotation of a size that is no power of two, for vectors on the left."""
    dim, run = len(signs), len(signs) & -len(signs)
    parts = range(run)
    hadamard = np.array([[(-1.0) ** (i & j).bit_count() for j in parts] for i in parts])
    runs = np.arange(dim // run)
    angles = 2 * np.pi / len(runs) * np.outer(runs, runs)
    hartley = np.cos(angles) + np.sin(angles)
    transform = np.kron(hartley, hadamard) * dim**-0.5
    return mx.array((signs[:, None] * transform).astype(np.float32))


def _times(x: mx.array, scale: float) -> mx.array:
    return x if scale == 1.0 else x * scale


@cache
def rotation(dim: int) -> Rotation:
    """Return the cached rotation of a size."""
    return Rotation(dim)
