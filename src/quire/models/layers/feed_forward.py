"""Dense feed-forward blocks: descriptions and modules. Experts are in `moe`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from quire.device.ranks import WHOLE, Part
from quire.models.base import Module
from quire.models.description import FeedForward, Norm
from quire.models.layers.common import ACTIVATIONS, GATES, GatedMLP
from quire.models.shares import Cuts, Run, Split, inputs, rows, within


@dataclass(frozen=True)
class CutByWidth:
    """A feed-forward block that processes share by its inner width."""

    width: int

    def share(self, split: Split) -> tuple[Self, Cuts]:
        width, run = split.width(self.width)
        return replace(self, width=width), width_cuts(run)


@dataclass(frozen=True)
class MLP(CutByWidth):
    """Two linear layers with an activation between, or three with a gate (arXiv:2002.05202).

    Attributes:
        limit: bound of both factors of the gate, see `Gating`; 0 means none.
        softcaps: see `Gating`.
    """

    activation: str
    gated: bool = True
    bias: bool = False
    limit: float = 0.0
    softcaps: tuple[float, float] = (0.0, 0.0)

    def module(self, hidden_size: int) -> Module:
        if not self.gated:
            return PlainMLP(hidden_size, self.width, self.activation, bias=self.bias)
        return GatedMLP(
            hidden_size,
            self.width,
            self.activation,
            bias=self.bias,
            limit=self.limit,
            softcaps=self.softcaps,
        )


@dataclass(frozen=True)
class ShortcutExperts:
    """The feed-forward blocks of two layers that are one, see `ShortcutLayer`.

    Attributes:
        dense: the dense block of each of both.
    """

    dense: MLP
    mixture: FeedForward

    def module(self, hidden_size: int) -> Module:
        return ShortcutBlocks(self, hidden_size)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        dense, found = self.dense.share(split)
        mixture, cuts = self.mixture.share(split)
        cuts = within("mixture", cuts) | within("first", found) | within("second", found)
        return replace(self, dense=dense, mixture=mixture), cuts


class ShortcutBlocks(Module):
    """The modules of a `ShortcutExperts`, which the layer calls."""

    def __init__(self, kind: ShortcutExperts, hidden_size: int) -> None:
        super().__init__()
        self.first, self.second = (kind.dense.module(hidden_size) for _ in range(2))
        self.mixture = kind.mixture.module(hidden_size)


def width_cuts(run: Run) -> Cuts:
    """Return the cuts of a block by the values between its products."""
    return {"gate_proj": rows(run), "up_proj": rows(run), "down_proj": inputs(run)}


@dataclass(frozen=True)
class XieluMLP(CutByWidth):
    """Two linear layers with a learned activation between (xIELU, arXiv:2411.13010)."""

    def module(self, hidden_size: int) -> Module:
        return LearnedMLP(hidden_size, self.width)


class LearnedMLP(Module):
    """Computes a `XieluMLP`."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)
        self.act_fn = Xielu()

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        y: mx.array = self.down_proj(self.act_fn(self.up_proj(x)))
        return y


class Xielu(Module):
    """The activation xIELU: a parabola above zero, an exponential below.

    Parameters, `[1]` each: `alpha_p` and `alpha_n`, the curvatures above and below, through
    softplus; `beta`, the slope at zero; `eps`, below zero, where the exponential is cut.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = mx.zeros(1), mx.zeros(1)
        self.beta, self.eps = mx.full(1, 0.5), mx.full(1, -1e-6)

    def __call__(self, x: mx.array) -> mx.array:
        """Apply the activation elementwise to any shape."""
        wide = x.astype(mx.float32)
        names = ("alpha_p", "alpha_n", "beta", "eps")
        above, below, slope, eps = (self[name].astype(mx.float32) for name in names)
        above, below = mx.logaddexp(above, 0.0), slope + mx.logaddexp(below, 0.0)
        curved = mx.where(
            wide > 0,
            above * mx.square(wide),
            below * (mx.expm1(mx.minimum(wide, eps)) - wide),
        )
        y: mx.array = (curved + slope * wide).astype(x.dtype)
        return y


@dataclass(frozen=True)
class NormedMLP:
    """Three linear layers with a gate, and a norm before the last (BitNet, arXiv:2402.17764).

    Attributes:
        width: inner width.
        part: the rank whose values these are.
    """

    width: int
    activation: str
    norm: Norm
    part: Part = WHOLE

    def module(self, hidden_size: int) -> Module:
        return GatedNormedMLP(self, hidden_size)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        width, run = split.width(self.width)
        cuts = {**width_cuts(run), "inner_norm": rows(run)}
        return replace(self, width=width, part=split.part), cuts


class GatedNormedMLP(Module):
    """Computes a `NormedMLP`."""

    def __init__(self, kind: NormedMLP, hidden_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, kind.width, bias=False)
        self.up_proj = nn.Linear(hidden_size, kind.width, bias=False)
        self.inner_norm = kind.norm.module_of(kind.part, kind.width)
        self.down_proj = nn.Linear(kind.width, hidden_size, bias=False)
        self._gate = GATES[kind.activation]

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        inner = self._gate(self.gate_proj(x), self.up_proj(x))
        y: mx.array = self.down_proj(self.inner_norm(inner))
        return y


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
