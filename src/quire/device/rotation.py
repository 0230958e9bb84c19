"""Rotary position embedding (arXiv:2104.09864) in MLX's operations."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

Rotate = Callable[[mx.array], mx.array]
"""A function that rotates `[T, heads, dim]`, each row by its position."""
Turn = Callable[[mx.array, mx.array, mx.array, mx.array], mx.array]


def turn(y: mx.array, swapped: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate pairs: `swapped` has the two elements of each pair exchanged."""
    return (y * cos + swapped * sin).astype(y.dtype)


def spelled_out(cosines: mx.array, sines: mx.array, neighbours: bool, turn: Turn) -> Rotate:
    """Return `Operations.rotation` in MLX's operations; angles are laid out once for all layers.

    Args:
        turn: the function of that name, compiled or not.
    """
    join, swap = (_join_pairs, _swap_pairs) if neighbours else (_join, _swap)
    cos, sin = join(cosines, cosines)[:, None], join(-sines, sines)[:, None]  # [T, 1, dims]
    dims = 2 * cosines.shape[-1]

    def rotate(x: mx.array) -> mx.array:
        in_part = dims < x.shape[-1]
        y = x[..., :dims] if in_part else x
        y = turn(y, swap(y), cos, sin)
        return mx.concatenate([y, x[..., dims:]], axis=-1) if in_part else y

    return rotate


def _join(first: mx.array, second: mx.array) -> mx.array:
    """Join halves `[..., dims / 2]` to heads `[..., dims]`: one half, then the other."""
    return mx.concatenate([first, second], axis=-1)


def _swap(y: mx.array) -> mx.array:
    """Exchange the two elements of each pair."""
    half = y.shape[-1] // 2
    return mx.concatenate([y[..., half:], y[..., :half]], axis=-1)


def _join_pairs(first: mx.array, second: mx.array) -> mx.array:
    """Join halves to heads in which the two elements of a pair are adjacent."""
    return mx.stack([first, second], axis=-1).flatten(-2)


def _swap_pairs(y: mx.array) -> mx.array:
    """Exchange the two elements of each pair, which are adjacent."""
    return y.reshape(*y.shape[:-1], -1, 2)[..., ::-1].flatten(-2)
