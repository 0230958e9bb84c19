"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464) and Qwen3.5's layer around it.

A layer's state is a matrix per head and the last inputs of a short convolution. Both have fixed
size, and each token replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import RecurrentState
from quire.device.device import current_device
from quire.device.recurrence import DeltaGates, waiting_parts
from quire.models.base import ForwardContext, Module
from quire.models.layers.causal_conv import CausalConv
from quire.models.layers.common import GATES
from quire.models.layers.norm import RMSNorm
from quire.models.shares import Cuts, Split, inputs, rows


@dataclass(frozen=True)
class GatedDelta:
    """Description of a gated delta net.

    Attributes:
        kernel: number of tokens that the convolution sees, including the current one.
        eps: epsilon of the output's norm.
        most_correction: upper limit of the write strength beta. Above 1 the state may change its
            sign (arXiv:2411.12537).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float
    most_correction: float = 1.0

    @property
    def attribute(self) -> str:
        return "linear_attn"

    @property
    def rotation(self) -> None:
        """None: order comes from the recurrence."""

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def spec(self) -> RecurrentState:
        """The state of a sequence: the convolution's last inputs, a matrix per value head, and the
        latest updates of these matrices where the device lets them wait.
        """
        values, keys = (self.value_heads, self.value_dim), (self.key_heads, self.key_dim)
        return RecurrentState(
            (
                ("conv", (self.kernel - 1, self.channels), ""),
                ("delta", (*values, self.key_dim), "float32"),
                *waiting_parts(current_device().deferred_updates, values, keys),
            )
        )

    def module(self, hidden_size: int, layer: int) -> Module:
        return GatedDeltaNet(self, hidden_size, layer)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        keys, values = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        by_head = rows((self.value_heads, 1))
        cuts = {
            "in_proj_qkv": rows(keys, keys, values),
            "in_proj_z": rows(values),
            "in_proj_b": by_head,
            "in_proj_a": by_head,
            "conv1d": rows(keys, keys, values),
            "dt_bias": by_head,
            "A_log": by_head,
            "out_proj": inputs(values),
        }
        own = replace(
            self,
            key_heads=split.few(self.key_heads, "heads of keys"),
            value_heads=split.heads(self.value_heads, "heads of values"),
        )
        return own, cuts


class GatedDeltaNet(Module):
    """Computes a `GatedDelta`."""

    def __init__(self, shape: GatedDelta, hidden: int, layer: int) -> None:
        super().__init__()
        self._shape, self._layer = shape, layer
        values = shape.value_heads * shape.value_dim
        self.in_proj_qkv = nn.Linear(hidden, shape.channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, shape.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, shape.value_heads, bias=False)
        self.conv1d = CausalConv(shape.channels, shape.kernel)
        self.dt_bias = mx.ones(shape.value_heads)
        self.A_log = mx.zeros(shape.value_heads)
        self.norm = RMSNorm(shape.value_dim, eps=shape.eps)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def __call__(self, x: mx.array, step: ForwardContext, rotate: None) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        shape, layer = self._shape, self._layer
        mixed = self.conv1d(self.in_proj_qkv(x), step, layer, silu=True)
        gates = DeltaGates(
            self.in_proj_a(x),
            self.in_proj_b(x),
            self.A_log,
            step_biases=self.dt_bias,
            most_correction=shape.most_correction,
        )
        y = self.norm(step.delta_rule(layer, mixed, gates, key_heads=shape.key_heads))
        gate = self.in_proj_z(x).reshape(y.shape)  # by head, so that one kernel norms and gates
        y = GATES["silu"](gate.astype(mx.float32), y)
        out: mx.array = self.out_proj(y.astype(x.dtype).flatten(1))
        return out
