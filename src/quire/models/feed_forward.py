"""Dense feed-forward blocks, described and computed; experts are in `moe`."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from quire.models.base import Module
from quire.models.layers import ACTIVATIONS, GatedMLP


@dataclass(frozen=True)
class MLP:
    """Two layers and an activation, or three with a gate (arXiv:2002.05202).

    Attributes:
        width: values between the layers.
    """

    width: int
    activation: str
    gated: bool = True
    bias: bool = False

    def module(self, hidden_size: int) -> Module:
        make = GatedMLP if self.gated else PlainMLP
        return make(hidden_size, self.width, self.activation, self.bias)


class PlainMLP(Module):
    """`down(act(up(x)))`."""

    def __init__(self, hidden_size: int, width: int, activation: str, bias: bool = False) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden_size, bias=bias)
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        y: mx.array = self.down_proj(self._activation(self.up_proj(x)))
        return y
