"""Kimi Delta Attention (arXiv:2510.26692): a gated delta net with per-channel decay.

A layer's state is a matrix per head and the last inputs of a short convolution. Both have fixed
size, and each token replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import RecurrentState
from quire.device.recurrence import DeltaGates
from quire.models.base import ForwardContext, Module
from quire.models.layers.causal_conv import CausalConv
from quire.models.layers.norm import RMSNorm
from quire.models.shares import Cuts, Split, inputs, rows


@dataclass(frozen=True)
class KimiDelta:
    """Description of a delta net with per-channel decay.

    Attributes:
        head_dim: size of a head's query, key and value, and inner width of narrow gates.
        kernel: number of tokens that the convolution sees, including the current one.
        eps: epsilon of the output's norm.
        narrow_gates: names of the gates, of "f" (forget) and "g" (output), that are computed by two
            matrices with `head_dim` values between, instead of one.
        most_forgotten: a negative factor; the logarithm of a channel's decay is this times a
            sigmoid. None means minus a softplus, which is unbounded.
    """

    heads: int
    head_dim: int
    kernel: int
    eps: float
    narrow_gates: str = "fg"
    most_forgotten: float | None = None

    @property
    def attribute(self) -> str:
        return "self_attn"

    @property
    def rotation(self) -> None:
        """None: order comes from the recurrence."""

    @property
    def width(self) -> int:
        """Values of all heads together."""
        return self.heads * self.head_dim

    @property
    def spec(self) -> RecurrentState:
        """The state of a sequence: the convolution's last inputs, and a matrix per head."""
        return RecurrentState(
            (
                ("conv", (self.kernel - 1, 3 * self.width), ""),
                ("delta", (self.heads, self.head_dim, self.head_dim), "float32"),
            )
        )

    def module(self, hidden_size: int, layer: int) -> Module:
        return KimiDeltaAttention(self, hidden_size, layer)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        heads = self.heads, self.head_dim
        by_head = rows((self.heads, 1))
        wide = ("q_proj", "k_proj", "v_proj", "f_proj", "g_proj", "f_b_proj", "g_b_proj", "dt_bias")
        cuts = {
            **dict.fromkeys(wide, rows(heads)),
            "conv1d": rows(heads, heads, heads),
            "A_log": by_head,
            "b_proj": by_head,
            "o_proj": inputs(heads),
        }
        return replace(self, heads=split.heads(self.heads)), cuts


class KimiDeltaAttention(Module):
    """Computes a `KimiDelta`."""

    def __init__(self, kind: KimiDelta, hidden: int, layer: int) -> None:
        super().__init__()
        self._kind, self._layer = kind, layer
        width = kind.width
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, width, bias=False)
        self.v_proj = nn.Linear(hidden, width, bias=False)
        self.conv1d = CausalConv(3 * width, kind.kernel)
        for gate in "fg":
            if gate in kind.narrow_gates:
                self[f"{gate}_a_proj"] = nn.Linear(hidden, kind.head_dim, bias=False)
                self[f"{gate}_b_proj"] = nn.Linear(kind.head_dim, width, bias=False)
            else:
                self[f"{gate}_proj"] = nn.Linear(hidden, width, bias=False)
        self.dt_bias = mx.ones(width)
        self.A_log = mx.zeros(kind.heads)
        self.b_proj = nn.Linear(hidden, kind.heads, bias=False)
        self.o_norm = RMSNorm(kind.head_dim, eps=kind.eps)
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: None) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        kind, layer, rows = self._kind, self._layer, x.shape[0]
        qkv = mx.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)
        mixed = self.conv1d(qkv, step, layer, silu=True).astype(mx.float32)
        gates = DeltaGates(
            self._gate("f", x).reshape(rows, kind.heads, kind.head_dim),
            self.b_proj(x).astype(mx.float32),
            self.A_log,
            step_biases=self.dt_bias,
            most_forgotten=kind.most_forgotten,
        )
        y = step.delta_rule(layer, mixed, gates, key_heads=kind.heads)
        y = self.o_norm(y).flatten(1) * mx.sigmoid(self._gate("g", x))
        out: mx.array = self.o_proj(y.astype(x.dtype))
        return out

    def _gate(self, name: str, x: mx.array) -> mx.array:
        """Return the forget ("f") or output ("g") gate before its sigmoid: float32 `[T, width]`."""
        if name in self._kind.narrow_gates:
            y: mx.array = self[f"{name}_b_proj"](self[f"{name}_a_proj"](x))
        else:
            y = self[f"{name}_proj"](x)
        return y.astype(mx.float32)
