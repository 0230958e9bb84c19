"""Mamba 2's state space layer (arXiv:2405.21060).

A layer keeps a matrix a head and the last inputs of a short convolution; both are of fixed size
and each token replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import RecurrentState
from quire.device.device import current_device
from quire.models.base import Module, RecurrentSegment, Step
from quire.models.layers import ACTIVATIONS
from quire.models.norm import unweighted_norm
from quire.models.recurrent import CausalConv, in_row_order, in_sequence, over_segments

_CHUNK = 64  # tokens whose pairs are computed at once


@dataclass(frozen=True)
class Mamba2:
    """A state space layer.

    Attributes:
        state_dim: columns of a head's matrix, N in the paper.
        groups: heads of one group share what is written and read by.
        kernel: how many tokens the convolution sees, the current one included.
        eps: of the norm of the output, which spans a group's heads; None is no norm.
        norm_first: the output is normalised before its gate, not after.
        out_bias: the last projection has a bias; None is as `bias`, which is of the first.
        min_step, max_step: bounds of a token's step size.
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

    @property
    def attribute(self) -> str:
        return "mamba"

    @property
    def rotation(self) -> None:
        """Order comes from the recurrence."""

    @property
    def width(self) -> int:
        """Values of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels that the convolution mixes in time: values, and both vectors of each group."""
        return self.width + 2 * self.groups * self.state_dim

    @property
    def spec(self) -> RecurrentState:
        """What a sequence keeps: the convolution's last inputs, and a matrix a head."""
        return RecurrentState(
            (
                ("conv", (self.kernel - 1, self.channels), ""),
                ("state", (self.heads, self.head_dim, self.state_dim), "float32"),
            )
        )

    def module(self, hidden_size: int, layer: int) -> Module:
        return Mamba2Mixer(self, hidden_size, layer)


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
        rows = kind.width + kind.channels + kind.heads
        self.in_proj = nn.Linear(hidden_size, rows, bias=kind.bias)
        self.conv1d = CausalConv(kind.channels, kind.kernel, kind.conv_bias)
        self.dt_bias = mx.ones(kind.heads)
        self.A_log = mx.zeros(kind.heads)
        self.D = mx.ones(kind.heads)
        if kind.eps is not None:
            self.norm = GroupNorm(kind.width, kind.groups, kind.eps)
        out_bias = kind.bias if kind.out_bias is None else kind.out_bias
        self.out_proj = nn.Linear(kind.width, hidden_size, bias=out_bias)

    def __call__(self, x: mx.array, step: Step, rotate: None) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        kind, segments = self._kind, step.recurrent(self._layer)
        order = in_sequence(segments)
        cuts = [kind.width, kind.width + kind.channels]
        gate, mixed, steps = mx.split(self.in_proj(x[order]), cuts, axis=-1)
        steps = mx.logaddexp(steps.astype(mx.float32) + self.dt_bias, 0.0)
        steps = mx.clip(steps, kind.min_step, kind.max_step)  # [T, heads]
        y = over_segments(
            segments, lambda segment, part: self._advance(segment, mixed[part], steps[part])
        )
        y = self._gated(y, ACTIVATIONS["silu"](gate.astype(mx.float32)))
        out: mx.array = self.out_proj(y.astype(x.dtype))
        return in_row_order(out, order)

    def _gated(self, y: mx.array, gate: mx.array) -> mx.array:
        if self._kind.eps is None:
            return y * gate
        out: mx.array = self.norm(y) * gate if self._kind.norm_first else self.norm(y * gate)
        return out

    def _advance(self, segment: RecurrentSegment, mixed: mx.array, steps: mx.array) -> mx.array:
        """Runs `n` sequences `t` tokens on: `[n * t, ...]` -> `[n * t, width]` in float32."""
        kind, n, t = self._kind, segment.n, segment.t
        window = mx.concatenate([segment.read("conv"), mixed.reshape(n, t, -1)], axis=1)
        segment.write("conv", window[:, t:])
        wide = self.conv1d(window, silu=True).astype(mx.float32)
        values, keys, queries = mx.split(
            wide, [kind.width, kind.width + kind.groups * kind.state_dim], axis=-1
        )
        values = values.reshape(n, t, kind.heads, kind.head_dim)
        keys = keys.reshape(n, t, kind.groups, kind.state_dim)
        queries = queries.reshape(n, t, kind.groups, kind.state_dim)
        steps = steps.reshape(n, t, kind.heads)
        rates = -mx.exp(self.A_log.astype(mx.float32))
        spaces = (values * steps[..., None], keys, queries, steps, rates, segment.read("state"))
        y, state = current_device().operations.state_space(*spaces) or state_space(*spaces)
        segment.write("state", state)
        return (y + values * self.D[:, None]).reshape(n * t, -1)


def state_space(
    values: mx.array,
    keys: mx.array,
    queries: mx.array,
    steps: mx.array,
    rates: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """`Operations.state_space` with a rate a head, in MLX's operations: many tokens at once."""
    copies = values.shape[2] // keys.shape[2]
    keys, queries = mx.repeat(keys, copies, axis=2), mx.repeat(queries, copies, axis=2)
    log_decay = rates * steps
    outputs = []
    for start in range(0, values.shape[1], _CHUNK):
        part = slice(start, start + _CHUNK)
        v, k, q = (each[:, part].swapaxes(1, 2) for each in (values, keys, queries))
        past = mx.cumsum(log_decay[:, part].swapaxes(1, 2), axis=-1)  # [n, heads, t]
        causal = mx.tri(past.shape[-1], dtype=mx.bool_)
        between = mx.where(causal, past[..., :, None] - past[..., None, :], -mx.inf)
        pairs = (q @ k.swapaxes(-1, -2)) * mx.exp(between)  # [n, heads, t, t]
        y = pairs @ v + (q * mx.exp(past)[..., None]) @ state.swapaxes(-1, -2)
        left = mx.exp(past[..., -1:] - past)  # of what each token added, after the last
        state = state * mx.exp(past[..., -1])[..., None, None] + (
            (v * left[..., None]).swapaxes(-1, -2) @ k
        )
        outputs.append(y.swapaxes(1, 2))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1), state
