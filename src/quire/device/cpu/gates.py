"""Activations and gates by the compiled CPU kernels."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from quire.device.activations import Gating
from quire.device.operations import UnfusedOperations

_NAMES = {"silu": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh", "gelu_new": "gelu_pytorch_tanh"}


def kernel_name(gating: Gating) -> str | None:
    """Return a gate's name in the extension; None if it has none."""
    return _NAMES.get(gating.activation) if gating.plain else None


class KernelGates(UnfusedOperations):
    """Activates float32 rows with the extension."""

    _ops: Any

    def tanh(self, x: mx.array) -> mx.array:
        if x.dtype != mx.float32:
            return super().tanh(x)
        y: mx.array = self._ops.tanh(x)
        return y

    def activate(self, name: str, x: mx.array) -> mx.array:
        if name not in _NAMES or x.dtype != mx.float32:
            return super().activate(name, x)
        activated: mx.array = self._ops.gate(x, mx.ones_like(x), _NAMES[name])
        return activated

    def gated(self, gating: Gating, x: mx.array, y: mx.array) -> mx.array:
        name = kernel_name(gating)
        if name is None or x.dtype != mx.float32:
            return super().gated(gating, x, y)
        joined: mx.array = self._ops.gate(x, y, name)
        return joined
