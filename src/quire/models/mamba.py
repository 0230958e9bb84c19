"""Mamba's selective state space layer (arXiv:2312.00752), also as Jamba has it (arXiv:2403.19887).

Each channel keeps a vector, and the last inputs of a short convolution; both are of fixed size and
each token replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import RecurrentState
from quire.device.device import current_device
from quire.models.base import Module, RecurrentSegment, Step
from quire.models.description import Norm
from quire.models.layers import ACTIVATIONS
from quire.models.recurrent import CausalConv, in_row_order, in_sequence, over_segments

_CHUNK = 32  # tokens that are scanned at once


@dataclass(frozen=True)
class Mamba:
    """A selective state space layer.

    Attributes:
        channels: of what is mixed in time.
        state_dim: values that a channel keeps, N in the paper.
        step_rank: size of what a token's step sizes are made from.
        kernel: how many tokens the convolution sees, the current one included.
        norm: of the step, and of the vectors that write and read; None leaves them.
        bias: of the first and the last projection.
    """

    channels: int
    state_dim: int
    step_rank: int
    kernel: int
    norm: Norm | None
    conv_bias: bool = True
    bias: bool = False

    @property
    def attribute(self) -> str:
        return "mamba"

    @property
    def rotation(self) -> None:
        """Order comes from the recurrence."""

    @property
    def spec(self) -> RecurrentState:
        """What a sequence keeps: the convolution's last inputs, and a vector a channel."""
        return RecurrentState(
            (
                ("conv", (self.kernel - 1, self.channels), ""),
                ("state", (self.channels, self.state_dim), "float32"),
            )
        )

    def module(self, hidden_size: int, layer: int) -> Module:
        return MambaMixer(self, hidden_size, layer)


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

    def __call__(self, x: mx.array, step: Step, rotate: None) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        segments = step.recurrent(self._layer)
        order = in_sequence(segments)
        mixed, gate = mx.split(self.in_proj(x[order]), 2, axis=-1)
        y = over_segments(segments, lambda segment, part: self._advance(segment, mixed[part]))
        y = y * ACTIVATIONS["silu"](gate.astype(mx.float32))
        out: mx.array = self.out_proj(y.astype(x.dtype))
        return in_row_order(out, order)

    def _advance(self, segment: RecurrentSegment, mixed: mx.array) -> mx.array:
        """Runs `n` sequences `t` tokens on: `[n * t, channels]`, the result in float32."""
        kind, n, t = self._kind, segment.n, segment.t
        window = mx.concatenate([segment.read("conv"), mixed.reshape(n, t, -1)], axis=1)
        segment.write("conv", window[:, t:])
        values = self.conv1d(window, silu=True)
        cuts = [kind.step_rank, kind.step_rank + kind.state_dim]
        steps, keys, queries = mx.split(self.x_proj(values), cuts, axis=-1)
        if kind.norm is not None:
            steps, keys = self.dt_layernorm(steps), self.b_layernorm(keys)
            queries = self.c_layernorm(queries)
        steps = self.dt_proj(steps).astype(mx.float32)
        steps = mx.logaddexp(steps, 0.0)  # [n, t, channels]
        values = values.astype(mx.float32)
        y, state = _advanced(
            values * steps,
            keys.astype(mx.float32),
            queries.astype(mx.float32),
            steps,
            -mx.exp(self.A_log.astype(mx.float32)),
            segment.read("state"),
        )
        segment.write("state", state)
        return (y + values * self.D).reshape(n * t, -1)


def _advanced(
    values: mx.array,
    keys: mx.array,
    queries: mx.array,
    steps: mx.array,
    rates: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """`selective_scan`, by a kernel where there is one: a channel is a head of one row."""
    advanced = current_device().operations.state_space(
        values[..., None], keys[:, :, None], queries[:, :, None], steps, rates, state[:, :, None]
    )
    if advanced is None:
        return selective_scan(values, keys, queries, steps, rates, state)
    y, after = advanced
    return y.squeeze(-1), after.squeeze(2)


def selective_scan(
    values: mx.array,
    keys: mx.array,
    queries: mx.array,
    steps: mx.array,
    rates: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """For each token and channel: forget, add the value at the key, read at the query.

    Args:
        values: `[n, t, channels]`.
        keys, queries: `[n, t, state_dim]`, B and C in the paper.
        steps: `[n, t, channels]`, at least 0; with `rates` they say how much is forgotten.
        rates: `[channels, state_dim]`, below 0.
        state: `[n, channels, state_dim]`. All are float32.

    Returns:
        `[n, t, channels]` and the state after the last token.
    """
    outputs = []
    for start in range(0, values.shape[1], _CHUNK):
        part = slice(start, start + _CHUNK)
        kept = mx.exp(steps[:, part, :, None] * rates)  # [n, t, channels, state_dim]
        added = values[:, part, :, None] * keys[:, part, None]
        added[:, 0] = added[:, 0] + kept[:, 0] * state
        added = _scanned(kept, added)
        outputs.append((added @ queries[:, part, :, None]).squeeze(-1))
        state = added[:, -1]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1), state


def _scanned(kept: mx.array, added: mx.array) -> mx.array:
    """The states `s[t] = kept[t] * s[t - 1] + added[t]` along axis 1, from zero.

    Spans are joined with those before them, twice as long each time (Hillis and Steele, 1986).
    """
    span, tokens = 1, kept.shape[1]
    while span < tokens:
        joined = added[:, span:] + kept[:, span:] * added[:, :-span]
        added = mx.concatenate([added[:, :span], joined], axis=1)
        kept = mx.concatenate([kept[:, :span], kept[:, span:] * kept[:, :-span]], axis=1)
        span *= 2
    return added
