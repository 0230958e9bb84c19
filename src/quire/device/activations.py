"""Activation functions by their Hugging Face names, as MLX compiles them and spelled out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn

Activation = Callable[[mx.array], mx.array]

_LOG2_E = math.log2(math.e)
# Constants are arrays, because MLX makes one of a number in every call.
_ONE, _TWO = mx.array(1.0), mx.array(2.0)
_SILU = mx.array(-_LOG2_E)
# Of y = sqrt(2 / pi) * (x + 0.044715 x^3): 0.5 * (1 + tanh(y)) is the sigmoid of 2y.
_GELU_CUBIC = mx.array(-2 * math.sqrt(2 / math.pi) * 0.044715 * _LOG2_E)
_GELU_LINEAR = mx.array(-2 * math.sqrt(2 / math.pi) * _LOG2_E)
_GELU_SCALE = mx.array(math.sqrt(0.5))
_HALF = mx.array(0.5)


def _silu(x: mx.array) -> mx.array:
    """Return `x * sigmoid(x)` by a power of two: 4 ns an element on a CPU, where MLX's exponentials
    take 11.
    """
    wide = x.astype(mx.float32)
    return (wide / (mx.power(_TWO, wide * _SILU) + _ONE)).astype(x.dtype)


def _gelu_tanh(x: mx.array) -> mx.array:
    """Return GELU's approximation by tanh (arXiv:1606.08415), by a power of two."""
    wide = x.astype(mx.float32)
    power = wide * (mx.square(wide) * _GELU_CUBIC + _GELU_LINEAR)
    return (wide / (mx.power(_TWO, power) + _ONE)).astype(x.dtype)


def _gelu(x: mx.array) -> mx.array:
    wide = x.astype(mx.float32)
    return (wide * (mx.erf(wide * _GELU_SCALE) + _ONE) * _HALF).astype(x.dtype)


def _quick_gelu(x: mx.array) -> mx.array:
    """Return GELU's approximation by a sigmoid (arXiv:1606.08415)."""
    return x * mx.sigmoid(x * 1.702)


def _squared_relu(x: mx.array) -> mx.array:
    return mx.square(mx.maximum(x, 0.0))


@partial(mx.compile, shapeless=True)
def _one_gelu_tanh(x: mx.array) -> mx.array:
    """Return GELU's approximation by tanh, as `x * sigmoid(2y)`: few enough operations for MLX to
    join them in one kernel, a product behind them included.
    """
    linear = 2 * math.sqrt(2 / math.pi)
    return x * mx.sigmoid(x * (linear + linear * 0.044715 * (x * x)))


COMPILED: dict[str, Activation] = {
    "silu": nn.silu,
    "gelu_pytorch_tanh": _one_gelu_tanh,
    "gelu": nn.gelu,
    "gelu_new": _one_gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu2": _squared_relu,
}
"""Activations for devices on which `mx.compile` delays no request."""

SPELLED_OUT: dict[str, Activation] = {
    "silu": _silu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu2": _squared_relu,
}
"""Activations without `mx.compile`, for CPUs and CUDA."""


@dataclass(frozen=True, slots=True)
class Gating:
    """How a gate `x` and a value `y` become one: `activation(x) * y` unless bounded.

    Attributes:
        activation: its name, see `COMPILED`.
        limit: upper bound of `activation(x)` and bound of `y` on both sides (Step 3.5); 0 for none.
        inner: whether `limit` bounds `x` instead of `activation(x)` (Hunyuan 4).
        alpha: gpt-oss's `x * sigmoid(alpha * x) * (y + 1)`, in which `limit` bounds `x` instead;
            0 is without.
        softcaps: Kimi K3's `cap(x) * sigmoid(x) * cap(y)`, with the bounds of both, by hyperbolic
            tangents; 0 is without, of `y` also an unbounded value.
    """

    activation: str
    limit: float = 0.0
    alpha: float = 0.0
    inner: bool = False
    softcaps: tuple[float, float] = (0.0, 0.0)

    @property
    def plain(self) -> bool:
        """Whether nothing is bounded."""
        return not (self.limit or self.alpha or self.softcaps[0])


def gated(gating: Gating, activation: Activation, x: mx.array, y: mx.array) -> mx.array:
    """Compute `Operations.gated` in MLX's operations.

    Args:
        activation: the function of that name.
    """
    if gating.plain:
        return activation(x) * y
    if gating.softcaps[0]:
        wide, value = x.astype(mx.float32), y.astype(mx.float32)
        of_gate, of_value = gating.softcaps
        value = _softcapped(value, of_value) if of_value else value
        return (_softcapped(wide, of_gate) * mx.sigmoid(wide) * value).astype(x.dtype)
    low, high = mx.array(-gating.limit), mx.array(gating.limit)
    if gating.alpha:
        bounded, value = mx.minimum(x, high), mx.clip(y, low, high)  # in float32
        slope = mx.array(gating.alpha)
        return (bounded * mx.sigmoid(bounded * slope) * (value + _ONE)).astype(x.dtype)
    active = activation(mx.minimum(x, high)) if gating.inner else mx.minimum(activation(x), high)
    return (active * mx.clip(y, low, high)).astype(x.dtype)


def _softcapped(x: mx.array, bound: float) -> mx.array:
    return mx.tanh(x / mx.array(bound)) * mx.array(bound)


class ElementOperations:
    """Functions of single elements that devices compute in their own way."""

    def tanh(self, x: mx.array) -> mx.array:
        """Return the hyperbolic tangent of each element."""
        return mx.tanh(x)
