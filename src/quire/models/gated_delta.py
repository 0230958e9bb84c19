"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464) and the layer around it in Qwen3.5.

A layer keeps a matrix a head and the last inputs of a short convolution; both are of fixed size
and each token replaces them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from quire.cache.specs import RecurrentState
from quire.device.device import current_device
from quire.device.operations import DeltaGates
from quire.models.base import Module, RecurrentSegment, Step
from quire.models.layers import GATES
from quire.models.norm import RMSNorm
from quire.models.recurrent import CausalConv, in_row_order, in_sequence, over_segments

_NORM_EPS = 1e-6  # of the keys' and queries' lengths, as in the flash-linear-attention library


@dataclass(frozen=True)
class GatedDelta:
    """A gated delta net.

    Attributes:
        kernel: how many tokens the convolution sees, the current one included.
        eps: of the norm of the output.
        most_correction: what the share of a value that is corrected approaches. Beyond 1 the state
            may change its sign (arXiv:2411.12537).
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
        """Order comes from the recurrence."""

    @property
    def channels(self) -> int:
        """Channels that the convolution mixes in time: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def spec(self) -> RecurrentState:
        """What a sequence keeps: the convolution's last inputs, and a matrix a value head."""
        return RecurrentState(
            (
                ("conv", (self.kernel - 1, self.channels), ""),
                ("delta", (self.value_heads, self.value_dim, self.key_dim), "float32"),
            )
        )

    def module(self, hidden_size: int, layer: int) -> Module:
        return GatedDeltaNet(self, hidden_size, layer)


class GatedDeltaNet(Module):
    """Computes a `GatedDelta`: what the matrix says of the query, gates writing and forgetting."""

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

    def __call__(self, x: mx.array, step: Step, rotate: None) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        segments = step.recurrent(self._layer)
        order = in_sequence(segments)
        x = x[order]
        qkv = self.in_proj_qkv(x)
        betas, steps = self.in_proj_b(x), self.in_proj_a(x)
        y = over_segments(
            segments,
            lambda segment, part: self._advance(segment, qkv[part], steps[part], betas[part]),
        )
        y = self.norm(y).reshape(x.shape[0], -1)
        y = GATES["silu"](self.in_proj_z(x).astype(mx.float32), y)
        out: mx.array = self.out_proj(y.astype(x.dtype))
        return in_row_order(out, order)

    def _advance(
        self, segment: RecurrentSegment, qkv: mx.array, steps: mx.array, betas: mx.array
    ) -> mx.array:
        """Runs `n` sequences `t` tokens on: `[n * t, ...]` -> `[n * t, value_heads, value_dim]`."""
        s, n, t = self._shape, segment.n, segment.t
        window = mx.concatenate([segment.read("conv"), qkv.reshape(n, t, -1)], axis=1)
        segment.write("conv", window[:, t:])
        mixed = self.conv1d(window, silu=True)
        gates = DeltaGates(
            steps.reshape(n, t, -1),
            betas.reshape(n, t, -1),
            self.A_log,
            self.dt_bias,
            s.most_correction,
        )
        y, state = delta_rule(mixed, gates, segment.read("delta"), s.key_heads)
        segment.write("delta", state)
        return y.reshape(n * t, s.value_heads, s.value_dim)


def delta_rule(
    mixed: mx.array, gates: DeltaGates, state: mx.array, key_heads: int
) -> tuple[mx.array, mx.array]:
    """`Operations.gated_delta`, in MLX's operations where the device has no kernel for it."""
    advanced = current_device().operations.gated_delta(mixed, gates, state, key_heads, _NORM_EPS)
    return advanced or spelled_out(mixed, gates, state, key_heads)


def spelled_out(
    mixed: mx.array, gates: DeltaGates, state: mx.array, key_heads: int
) -> tuple[mx.array, mx.array]:
    """`Operations.gated_delta` in MLX's operations."""
    n, t, _ = mixed.shape
    heads, value_dim, key_dim = state.shape[1:]
    keys = key_heads * key_dim
    q, k, v = mx.split(mixed, [keys, 2 * keys], axis=-1)
    advance = gated_delta if gates.steps.ndim == 3 else channel_delta
    return advance(
        unit(q.reshape(n, t, key_heads, key_dim)) * key_dim**-0.5,
        unit(k.reshape(n, t, key_heads, key_dim)),
        v.reshape(n, t, heads, value_dim),
        _kept(gates),
        mx.sigmoid(gates.betas) * gates.most_correction,
        state,
    )


def _kept(gates: DeltaGates) -> mx.array:
    """What states keep of themselves: float32, as `steps`."""
    steps = gates.steps.astype(mx.float32)
    steps = steps + gates.step_biases.reshape(steps.shape[2:])
    rates = mx.exp(gates.log_rates.astype(mx.float32))
    if steps.ndim == 4:
        rates = rates[:, None]
    if gates.most_forgotten is not None:
        return mx.exp(gates.most_forgotten * mx.sigmoid(rates * steps))
    return mx.exp(-rates * mx.logaddexp(steps, 0.0))


def unit(x: mx.array) -> mx.array:
    """`x / sqrt(sum(x ** 2) + eps)` over the last axis, by the fused norm."""
    dim = x.shape[-1]
    normed: mx.array = mx.fast.rms_norm(x, None, _NORM_EPS / dim)
    return normed * (1 / math.sqrt(dim))


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, kept: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """For each token: forget, compare the value at `k` with `v`, correct it by `beta`, read at `q`.

    Args:
        q, k: `[n, t, key_heads, key_dim]`; each serves consecutive value heads.
        v: `[n, t, value_heads, value_dim]`.
        kept: `[n, t, value_heads]`, in (0, 1); multiplies the state.
        beta: `[n, t, value_heads]`, in (0, 2).
        state: `[n, value_heads, value_dim, key_dim]`, float32.

    Returns:
        `[n, t, value_heads, value_dim]` and the state after the last token.
    """
    # Not by matrix products over chunks of tokens (the paper's section 3.3), which read a prompt
    # faster on a CPU: their last bits depend on where it is cut, and turn a packed cache's codes.
    y, state = mx.fast.gated_delta_update(q, k, v, kept, beta, initial_state=state)
    return y, state


def channel_delta(
    q: mx.array, k: mx.array, v: mx.array, kept: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """`gated_delta` where each column of a state forgets by itself.

    Args:
        q, k: `[n, t, heads, key_dim]`.
        v: `[n, t, heads, value_dim]`.
        kept: `[n, t, heads, key_dim]`, in (0, 1); multiplies the columns of the state.
        beta: `[n, t, heads]`, in (0, 2).
        state: `[n, heads, value_dim, key_dim]`, float32.

    Returns:
        `[n, t, heads, value_dim]` and the state after the last token.
    """
    # Token by token, so that its last bits do not depend on where a prompt is cut; MLX's fused
    # delta rule forgets by head alone.
    written = k * beta[..., None]
    rows = (mx.split(each, each.shape[1], axis=1) for each in (q, k, written, kept))
    values = mx.split(v[..., None], v.shape[1], axis=1)
    outputs = []
    for query, key, change, left, value in zip(*rows, values, strict=True):
        # Rows stand over the columns of a state, `[n, heads, 1, key_dim]`.
        state = state * left.swapaxes(1, 2)
        error = value.squeeze(1) - (state * key.swapaxes(1, 2)).sum(axis=-1, keepdims=True)
        state = state + error * change.swapaxes(1, 2)
        outputs.append((state * query.swapaxes(1, 2)).sum(axis=-1))
    return mx.stack(outputs, axis=1), state
