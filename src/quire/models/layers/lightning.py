"""Lightning attention (arXiv:2405.17381): a linear attention whose heads forget at fixed rates.

A layer's state is a matrix per head, which each token replaces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import RecurrentState
from quire.device.ranks import WHOLE, Part
from quire.models.base import ForwardContext, Module
from quire.models.description import Norm, Rotation
from quire.models.layers.mamba2 import GroupNorm
from quire.models.layers.norm import RankNorm
from quire.models.layers.rope import RopeParameters, Rotate
from quire.models.shares import Cuts, Split, inputs, rows


@dataclass(frozen=True)
class LightningAttention:
    """Description of a lightning attention, whose output is normalised and gated.

    Attributes:
        rates: of each head, the logarithm of what the state keeps with a token, below 0.
        groups: number of groups of heads that the output's norm spans, one each.
        qk_norm: norm of each head's query and key; None means none.
        part: the rank whose heads these are.
    """

    heads: int
    head_dim: int
    rates: tuple[float, ...]
    rope: RopeParameters
    groups: int
    eps: float
    qk_norm: Norm | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    part: Part = WHOLE

    @property
    def attribute(self) -> str:
        return "self_attn"

    @property
    def rotation(self) -> Rotation | None:
        return self.head_dim, self.rope

    @property
    def width(self) -> int:
        """Values of all heads together."""
        return self.heads * self.head_dim

    @property
    def spec(self) -> RecurrentState:
        """The state of a sequence: a matrix per head."""
        return RecurrentState((("state", (self.heads, self.head_dim, self.head_dim), "float32"),))

    def module(self, hidden_size: int, layer: int) -> Module:
        return LightningMixer(self, hidden_size, layer)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        heads = self.heads, self.head_dim
        wide = ("q_proj", "k_proj", "v_proj", "g_proj", "g_norm")
        cuts = {**dict.fromkeys(wide, rows(heads)), "o_proj": inputs(heads)}
        count = split.heads(self.heads)
        first = split.part.rank * count
        own = replace(self, heads=count, rates=self.rates[first : first + count], part=split.part)
        return own, cuts

    def norm(self) -> Module:
        """Return the norm of the output."""
        if self.part == WHOLE:
            return GroupNorm(self.width, self.groups, self.eps)
        return RankNorm(self.width, self.eps, self.part, groups=self.groups)


def fixed_rates(heads: int, layer: int, layers: int) -> tuple[float, ...]:
    """Return the rates of a layer's heads: slopes of ALiBi (arXiv:2108.12409), less in deeper
    layers.
    """
    whole = 1 << (heads.bit_length() - 1)
    slopes = _slopes(whole)
    if whole < heads:
        slopes += _slopes(2 * whole)[::2][: heads - whole]
    factor = 1 - max(0, layer - 1) / max(1, layers - 1) + 1e-5
    return tuple(-slope * factor for slope in slopes)


def _slopes(heads: int) -> list[float]:
    first = 2.0 ** -(2.0 ** -(math.log2(heads) - 3))
    return [first ** (index + 1) for index in range(heads)]


class LightningMixer(Module):
    """Computes a `LightningAttention`."""

    same_rows = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, kind: LightningAttention, hidden_size: int, layer: int) -> None:
        super().__init__()
        self._kind, self._layer = kind, layer
        self._rates = mx.array(kind.rates)
        width = kind.width
        self.q_proj = nn.Linear(hidden_size, width, bias=kind.qkv_bias)
        self.k_proj = nn.Linear(hidden_size, width, bias=kind.qkv_bias)
        self.v_proj = nn.Linear(hidden_size, width, bias=kind.qkv_bias)
        if kind.qk_norm is not None:
            self.q_norm = kind.qk_norm.module(kind.head_dim)
            self.k_norm = kind.qk_norm.module(kind.head_dim)
        self.g_proj = nn.Linear(hidden_size, width, bias=False)
        self.g_norm = kind.norm()
        self.o_proj = nn.Linear(width, hidden_size, bias=kind.out_bias)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: Rotate) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        kind, shape = self._kind, (x.shape[0], self._kind.heads, self._kind.head_dim)
        q, k = self.q_proj(x).reshape(shape), self.k_proj(x).reshape(shape)
        if kind.qk_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = rotate(q), rotate(k), self.v_proj(x).reshape(shape)
        y = step.state_space(
            self._layer,
            v.astype(mx.float32),
            k.astype(mx.float32),
            queries=q.astype(mx.float32) * kind.head_dim**-0.5,
            steps=mx.ones(shape[:2]),
            rates=self._rates,
        )
        y = self.g_norm(y.flatten(1)) * mx.sigmoid(self.g_proj(x).astype(mx.float32))
        out: mx.array = self.o_proj(y.astype(x.dtype))
        return out
