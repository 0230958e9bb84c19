"""LFM2's gated short convolution, which mixes a token with the few before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import RecurrentState
from quire.models.base import ForwardContext, Module
from quire.models.layers.causal_conv import CausalConv
from quire.models.shares import Cuts, Split, inputs, rows


@dataclass(frozen=True)
class ShortConv:
    """Description of a convolution between two gates.

    Attributes:
        channels: the hidden size, or a rank's share of it.
        kernel: number of tokens that the convolution sees, including the current one.
        bias: whether the convolution and both projections have biases.
    """

    channels: int
    kernel: int
    bias: bool = False

    @property
    def attribute(self) -> str:
        return "conv"

    @property
    def rotation(self) -> None:
        """None: order comes from the convolution."""

    @property
    def spec(self) -> RecurrentState:
        """The state of a sequence: the convolution's last inputs."""
        return RecurrentState((("conv", (self.kernel - 1, self.channels), ""),))

    def module(self, hidden_size: int, layer: int) -> Module:
        return GatedShortConv(self, hidden_size, layer)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        channels, run = split.width(self.channels)
        cuts = {"in_proj": rows(run, run, run), "conv": rows(run), "out_proj": inputs(run)}
        return replace(self, channels=channels), cuts


class GatedShortConv(Module):
    """Computes a `ShortConv`."""

    def __init__(self, kind: ShortConv, hidden_size: int, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self.in_proj = nn.Linear(hidden_size, 3 * kind.channels, bias=kind.bias)
        self.conv = CausalConv(kind.channels, kind.kernel, kind.bias)
        self.out_proj = nn.Linear(kind.channels, hidden_size, bias=kind.bias)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: None) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        before, after, value = mx.split(self.in_proj(x), 3, axis=-1)
        out: mx.array = self.out_proj(after * self.conv(before * value, step, self._layer))
        return out
