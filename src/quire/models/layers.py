"""Layers that families share. Rows are a step's tokens: `[T, hidden]`, no batch axis."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from quire.models.base import Module

Activation = Callable[[mx.array], mx.array]
Gate = Callable[[mx.array, mx.array], mx.array]


def _sigmoid(x: mx.array) -> mx.array:
    """By a power of two, which takes MLX 4 ns on a CPU, where exponentials and tanh take 11."""
    return 1.0 / (1.0 + mx.power(2.0, x.astype(mx.float32) * -math.log2(math.e)))


def _silu(x: mx.array) -> mx.array:
    return (x * _sigmoid(x)).astype(x.dtype)


def _gelu_tanh(x: mx.array) -> mx.array:
    # 0.5 * (1 + tanh(y)) is the sigmoid of 2y (arXiv:1606.08415)
    y = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return (x * _sigmoid(2 * y)).astype(x.dtype)


_CPU = mx.default_device() == mx.cpu

ACTIVATIONS: dict[str, Activation] = {
    "silu": _silu if _CPU else nn.silu,
    "gelu_pytorch_tanh": _gelu_tanh if _CPU else nn.gelu_approx,
    "gelu": nn.gelu,
}
"""The values of `hidden_act` and `hidden_activation` that are known."""


def _gate(activation: Activation) -> Gate:
    def gate(x: mx.array, y: mx.array) -> mx.array:
        return activation(x) * y

    compiled: Gate = mx.compile(gate, shapeless=True)
    return compiled


GATES: dict[str, Gate] = {name: _gate(function) for name, function in ACTIVATIONS.items()}
"""By the same names, `activation(x) * y` in one kernel."""


class GatedMLP(Module):
    """`down(act(gate(x)) * up(x))` (SwiGLU with silu, GeGLU with gelu; arXiv:2002.05202)."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self._gate = GATES[activation]

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        y: mx.array = self.down_proj(self._gate(self.gate_proj(x), self.up_proj(x)))
        return y


def embed(table: nn.Embedding, tokens: mx.array, dtype: mx.Dtype) -> mx.array:
    """Looks up rows `[T, hidden]`. Some packed tables decode to bfloat16 whatever the model is."""
    rows: mx.array = table(tokens)
    return rows if rows.dtype == dtype else rows.astype(dtype)


def project_logits(
    hidden: mx.array, table: nn.Embedding, head: nn.Linear | None, softcap: float | None = None
) -> mx.array:
    """`[R, hidden]` -> `[R, vocab]` in float32, by the head or, where it is tied, by the table."""
    logits: mx.array = table.as_linear(hidden) if head is None else head(hidden)
    if logits.dtype != mx.float32:
        logits = logits.astype(mx.float32)
    return logits if softcap is None else mx.tanh(logits / softcap) * softcap
