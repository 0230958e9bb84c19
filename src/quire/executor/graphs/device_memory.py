"""Allocates the device memory that kernels of graphs write and read."""

from __future__ import annotations

import mlx.core as mx


def unwritten(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return memory that kernels write before they read it. Its contents mean nothing; tests fill
    it with NaN.
    """
    memory = mx.zeros(shape, dtype)  # MLX makes no array without contents
    mx.eval(memory)
    return memory
