"""Mamba's selective state space layer (arXiv:2312.00752), also in Jamba's form (arXiv:2403.19887).

A channel's state is a vector and the last inputs of a short convolution. Both have fixed size, and
each token replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import RecurrentState
from quire.device.collectives import summed
from quire.device.ranks import WHOLE, Part
from quire.models.base import ForwardContext, Module
from quire.models.description import Norm
from quire.models.layers.causal_conv import CausalConv
from quire.models.layers.common import ACTIVATIONS
from quire.models.shares import Cuts, Split, inputs, rows


@dataclass(frozen=True)
class Mamba:
    """Description of a selective state space layer.

    Attributes:
        channels: number of channels that are mixed in time.
        state_dim: size of a channel's state, N in the paper.
        step_rank: rank of the projection to a token's step sizes.
        kernel: number of tokens that the convolution sees, including the current one.
        norm: norm of the step and of the vectors that write and read the state; None means none.
        bias: whether the first and the last projection have biases.
        part: the rank whose channels these are.
    """

    channels: int
    state_dim: int
    step_rank: int
    kernel: int
    norm: Norm | None
    conv_bias: bool = True
    bias: bool = False
    part: Part = WHOLE

    @property
    def attribute(self) -> str:
        return "mamba"

    @property
    def rotation(self) -> None:
        """None: order comes from the recurrence."""

    @property
    def spec(self) -> RecurrentState:
        """The state of a sequence: the convolution's last inputs, and a vector per channel."""
        return RecurrentState(
            (
                ("conv", (self.kernel - 1, self.channels), ""),
                ("state", (self.channels, self.state_dim), "float32"),
            )
        )

    def module(self, hidden_size: int, layer: int) -> Module:
        return MambaMixer(self, hidden_size, layer)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        channels, run = split.width(self.channels)
        own = rows(run)
        cuts = {
            "in_proj": rows(run, run),
            "conv1d": own,
            "x_proj": inputs(run),
            "dt_proj": own,
            "A_log": own,
            "D": own,
            "out_proj": inputs(run),
        }
        return replace(self, channels=channels, part=split.part), cuts


class MambaMixer(Module):
    """Computes a `Mamba`."""

    def __init__(self, kind: Mamba, hidden_size: int, layer: int) -> None:
        super().__init__()
        self._kind, self._layer = kind, layer
        self.in_proj = nn.Linear(hidden_size, 2 * kind.channels, bias=kind.bias)
        self.conv1d = CausalConv(kind.channels, kind.kernel, kind.conv_bias)
        self.x_proj = nn.Linear(kind.channels, kind.step_rank + 2 * kind.state_dim, bias=False)
        if kind.norm is not None:
            self.dt_layernorm = kind.norm.module(kind.step_rank)
            self.b_layernorm = kind.norm.module(kind.state_dim)
            self.c_layernorm = kind.norm.module(kind.state_dim)
        self.dt_proj = nn.Linear(kind.step_rank, kind.channels, bias=True)
        self.A_log = mx.zeros((kind.channels, kind.state_dim))
        self.D = mx.ones(kind.channels)
        self.out_proj = nn.Linear(kind.channels, hidden_size, bias=kind.bias)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: None) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        kind, layer = self._kind, self._layer
        mixed, gate = mx.split(self.in_proj(x), 2, axis=-1)
        values = self.conv1d(mixed, step, layer, silu=True)
        cuts = [kind.step_rank, kind.step_rank + kind.state_dim]
        read = summed(self.x_proj(values), kind.part)  # of all channels
        steps, keys, queries = mx.split(read, cuts, axis=-1)
        if kind.norm is not None:
            steps, keys = self.dt_layernorm(steps), self.b_layernorm(keys)
            queries = self.c_layernorm(queries)
        steps = mx.logaddexp(self.dt_proj(steps).astype(mx.float32), 0.0)  # [T, channels]
        keys, queries = (each.astype(mx.float32)[:, None] for each in (keys, queries))
        values = values.astype(mx.float32)
        rates = -mx.exp(self.A_log.astype(mx.float32))
        # A channel is a head of one value.
        y = step.state_space(
            layer, (values * steps)[..., None], keys, queries=queries, steps=steps, rates=rates
        )
        y = y.squeeze(-1) + values * self.D
        y = y * ACTIVATIONS["silu"](gate.astype(mx.float32))
        out: mx.array = self.out_proj(y.astype(x.dtype))
        return out
