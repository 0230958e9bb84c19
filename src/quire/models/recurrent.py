"""What recurrent layers share: going through a step's sequences, and short causal convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from quire.device.device import current_device
from quire.models.base import Module, RecurrentSegment
from quire.models.layers import ACTIVATIONS


def in_sequence(segments: Sequence[RecurrentSegment]) -> mx.array:
    """The rows of a step, sequence after sequence, so that a segment is a slice: `[T]`."""
    rows = [segment.rows for segment in segments]
    return rows[0] if len(rows) == 1 else mx.concatenate(rows)


def in_row_order(y: mx.array, order: mx.array) -> mx.array:
    """Undoes `in_sequence`: `[T, -]` in the order of a step's rows."""
    return y[mx.argsort(order).astype(mx.int32)]


def over_segments(
    segments: Sequence[RecurrentSegment], advance: Callable[[RecurrentSegment, slice], mx.array]
) -> mx.array:
    """What `advance` gives for each segment and its slice of the rows, one after the other."""
    outputs, start = [], 0
    for segment in segments:
        outputs.append(advance(segment, slice(start, start := start + segment.n * segment.t)))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


class CausalConv(Module):
    """One filter a channel over the last tokens. Parameters: weight, and bias if it has one."""

    def __init__(self, channels: int, kernel: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = mx.zeros((channels, kernel, 1))
        if bias:
            self.bias = mx.zeros(channels)

    def __call__(self, window: mx.array, *, silu: bool = False) -> mx.array:
        """`[n, kernel - 1 + t, channels]` -> `[n, t, channels]`, through SiLU if `silu`."""
        taps, bias = self.weight.squeeze(-1), self.get("bias")
        out = current_device().operations.causal_conv(window, taps, bias, silu)
        if out is not None:
            return out
        out = self._spelled_out(window)
        return ACTIVATIONS["silu"](out) if silu else out

    def _spelled_out(self, window: mx.array) -> mx.array:
        """The same without activation, in MLX's operations."""
        taps = self.weight.squeeze(-1).T  # [kernel, channels]
        kernel = taps.shape[0]
        t = window.shape[1] - kernel + 1
        if t == 1:
            out = (window * taps).sum(axis=1, keepdims=True)
        else:
            # Slices: a number as an index is a gather, which a GPU would have to compile.
            out = window[:, :t] * taps[:1]
            for offset in range(1, kernel):
                out = out + window[:, offset : offset + t] * taps[offset : offset + 1]
        return out + self.bias if "bias" in self else out
