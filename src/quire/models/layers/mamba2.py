"""Mamba 2's state space layer (arXiv:2405.21060).

A layer's state is a matrix per head and the last inputs of a short convolution. Both have fixed
size, and each token replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import RecurrentState
from quire.device.ranks import WHOLE, Part
from quire.models.base import ForwardContext, Module
from quire.models.layers.causal_conv import CausalConv
from quire.models.layers.common import ACTIVATIONS
from quire.models.layers.norm import RankNorm, unweighted_norm
from quire.models.shares import Cuts, Split, inputs, rows


@dataclass(frozen=True)
class Mamba2:
    """Description of Mamba 2's state space layer.

    Attributes:
        state_dim: columns of a head's state, N in the paper.
        groups: number of groups of heads that share the vectors that write and read the state.
        kernel: number of tokens that the convolution sees, including the current one.
        eps: epsilon of the output's norm, which spans a group's heads; None means no norm.
        norm_first: whether the output is normalised before it is gated, instead of after.
        out_bias: whether the last projection has a bias; None means as `bias`, the first
            projection's.
        min_step, max_step: bounds of a token's step size.
        part: the rank whose heads these are.
        shared_groups: number of all groups, if several ranks have heads of one; else 0.
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    kernel: int
    eps: float | None
    norm_first: bool = False
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool | None = None
    min_step: float = 0.0
    max_step: float = float("inf")
    part: Part = WHOLE
    shared_groups: int = 0

    @property
    def attribute(self) -> str:
        return "mamba"

    @property
    def rotation(self) -> None:
        """None: order comes from the recurrence."""

    @property
    def width(self) -> int:
        """Values of all heads together."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, and the vectors of each group that write and
        read.
        """
        return self.width + 2 * self.groups * self.state_dim

    @property
    def spec(self) -> RecurrentState:
        """The state of a sequence: the convolution's last inputs, and a matrix per head."""
        return RecurrentState(
            (
                ("conv", (self.kernel - 1, self.channels), ""),
                ("state", (self.heads, self.head_dim, self.state_dim), "float32"),
            )
        )

    def module(self, hidden_size: int, layer: int) -> Module:
        return Mamba2Mixer(self, hidden_size, layer)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        values, vectors = (self.heads, self.head_dim), (self.groups, self.state_dim)
        by_head = rows((self.heads, 1))
        cuts = {
            "in_proj": rows(values, values, vectors, vectors, (self.heads, 1)),
            "conv1d": rows(values, vectors, vectors),
            "dt_bias": by_head,
            "A_log": by_head,
            "D": by_head,
            "norm": rows(values),
            "out_proj": inputs(values),
        }
        own = replace(
            self,
            heads=split.heads(self.heads, "heads of state spaces"),
            groups=split.few(self.groups, "groups of heads"),
            part=split.part,
            shared_groups=self.groups if self.groups < split.part.size else 0,
        )
        return own, cuts

    def norm(self) -> Module:
        """Return the norm of the output."""
        assert self.eps is not None
        if self.shared_groups:
            return RankNorm(self.width, self.eps, self.part, groups=self.shared_groups)
        return GroupNorm(self.width, self.groups, self.eps)


class GroupNorm(Module):
    """RMS norm of each of `groups` parts of the last axis. Parameter: weight `[dim]`."""

    def __init__(self, dim: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones(dim)
        self._groups = groups
        self._norm = unweighted_norm(eps)

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, dim]` -> the same."""
        parts = x.reshape(x.shape[0], self._groups, -1)
        return self._norm(parts).flatten(1, 2) * self.weight


class Mamba2Mixer(Module):
    """Computes a `Mamba2`."""

    def __init__(self, kind: Mamba2, hidden_size: int, layer: int) -> None:
        super().__init__()
        self._kind, self._layer = kind, layer
        width = kind.width + kind.channels + kind.heads
        self.in_proj = nn.Linear(hidden_size, width, bias=kind.bias)
        self.conv1d = CausalConv(kind.channels, kind.kernel, kind.conv_bias)
        self.dt_bias = mx.ones(kind.heads)
        self.A_log = mx.zeros(kind.heads)
        self.D = mx.ones(kind.heads)
        if kind.eps is not None:
            self.norm = kind.norm()
        out_bias = kind.bias if kind.out_bias is None else kind.out_bias
        self.out_proj = nn.Linear(kind.width, hidden_size, bias=out_bias)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: None) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        kind, layer, count = self._kind, self._layer, x.shape[0]
        cuts = [kind.width, kind.width + kind.channels]
        gate, mixed, steps = mx.split(self.in_proj(x), cuts, axis=-1)
        steps = mx.logaddexp(steps.astype(mx.float32) + self.dt_bias, 0.0)
        steps = mx.clip(steps, kind.min_step, kind.max_step)  # [T, heads]
        wide = self.conv1d(mixed, step, layer, silu=True).astype(mx.float32)
        cuts = [kind.width, kind.width + kind.groups * kind.state_dim]
        values, keys, queries = mx.split(wide, cuts, axis=-1)
        values = values.reshape(count, kind.heads, kind.head_dim)
        keys = keys.reshape(count, kind.groups, kind.state_dim)
        queries = queries.reshape(count, kind.groups, kind.state_dim)
        rates = -mx.exp(self.A_log.astype(mx.float32))
        y = step.state_space(
            layer, values * steps[..., None], keys, queries=queries, steps=steps, rates=rates
        )
        y = (y + values * self.D[:, None]).flatten(1)
        y = self._gated(y, ACTIVATIONS["silu"](gate.astype(mx.float32)))
        out: mx.array = self.out_proj(y.astype(x.dtype))
        return out

    def _gated(self, y: mx.array, gate: mx.array) -> mx.array:
        if self._kind.eps is None:
            return y * gate
        out: mx.array = self.norm(y) * gate if self._kind.norm_first else self.norm(y * gate)
        return out
