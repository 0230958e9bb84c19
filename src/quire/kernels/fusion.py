"""Elementwise operations as one kernel, where that costs no request its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import mlx.core as mx

P = ParamSpec("P")
T = TypeVar("T")


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """One kernel for all of `function`, whatever the shapes, on a GPU; on a CPU `function` itself.

    For a CPU MLX writes C++ and runs `g++`, one to five seconds for each kernel, in the step that
    needs it first. Spelled in few operations the same arithmetic is as fast for many rows.
    """
    if mx.default_device() == mx.cpu:
        return function
    compiled: Callable[P, T] = mx.compile(function, shapeless=True)
    return compiled
