"""Layers that families share. Their inputs are a step's rows `[T, hidden]`, without a batch
axis.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from quire.device import activations
from quire.device.activations import Activation, Gating
from quire.device.device import current_device, fused
from quire.device.weights import GatedMatrices
from quire.models.base import Module
from quire.models.layers.linear import matrix_of

Gate = Callable[[mx.array, mx.array], mx.array]


def _activation(name: str) -> Activation:
    return lambda x: current_device().operations.activate(name, x)


ACTIVATIONS: dict[str, Activation] = {name: _activation(name) for name in activations.COMPILED}
"""Supported values of `hidden_act` and `hidden_activation`."""


def _gate(name: str) -> Gate:
    return lambda x, y: current_device().operations.gated(Gating(name), x, y)


GATES: dict[str, Gate] = {name: _gate(name) for name in activations.COMPILED}
"""Functions `activation(x) * y` by the same names, as one kernel if the device has one."""


class GatedMLP(Module):
    """`down(act(gate(x)) * up(x))` (SwiGLU with silu, GeGLU with gelu; arXiv:2002.05202).

    Args:
        limit, softcaps: see `Gating`.
    """

    same_rows = (("gate_proj", "up_proj"),)

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        bias: bool = False,
        limit: float = 0.0,
        softcaps: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self._gating = Gating(activation, limit, softcaps=softcaps)
        self._matrices: GatedMatrices | None = None
        """The weights in the form of the device's operations; cached on first use."""

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        if self._matrices is None:
            gate, up = matrix_of(self.gate_proj), matrix_of(self.up_proj)
            self._matrices = GatedMatrices(gate, up, matrix_of(self.down_proj), gating=self._gating)
        return current_device().operations.gated_mlp(x, self._matrices)


def embed(table: nn.Embedding, tokens: mx.array, dtype: mx.Dtype) -> mx.array:
    """Look up rows `[T, hidden]` in `dtype`. Some quantised tables decode to bfloat16 in
    any model.
    """
    rows: mx.array = table(tokens)
    return rows if rows.dtype == dtype else rows.astype(dtype)


def project_logits(
    hidden: mx.array, table: nn.Embedding, head: nn.Linear | None, softcap: float | None = None
) -> mx.array:
    """Return float32 logits: `[R, hidden]` -> `[R, vocab]`, by the head or, if tied, by the
    table.
    """
    logits: mx.array = table.as_linear(hidden) if head is None else head(hidden)
    if softcap is not None:
        return _softcapped(softcap)(logits)
    return logits if logits.dtype == mx.float32 else logits.astype(mx.float32)


@cache
def _softcapped(cap: float) -> Activation:
    """Return a function that computes `cap * tanh(x / cap)` in float32."""

    def softcapped(x: mx.array) -> mx.array:
        return current_device().operations.tanh(x.astype(mx.float32) / cap) * cap

    return fused(softcapped)
