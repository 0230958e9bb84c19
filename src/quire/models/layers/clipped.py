"""Layers that Gemma 4's vision and audio encoders share."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from quire.models.base import Module
from quire.models.layers.norm import unweighted_norm

CLIP_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""Bounds of a clipped linear layer. Checkpoints may contain them even if they are not used."""


class ClippedLinear(Module):
    """A linear layer that clips its input and output if `clips`."""

    def __init__(self, clips: bool, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self._clips = clips
        if self._clips:
            self.input_min, self.input_max = mx.array(-mx.inf), mx.array(mx.inf)
            self.output_min, self.output_max = mx.array(-mx.inf), mx.array(mx.inf)

    def __call__(self, x: mx.array) -> mx.array:
        """`[N, inputs]` -> `[N, outputs]`."""
        if not self._clips:
            plain: mx.array = self.linear(x)
            return plain
        y = self.linear(_clipped(x, self.input_min, self.input_max))
        return _clipped(y, self.output_min, self.output_max)


def _clipped(x: mx.array, low: mx.array, high: mx.array) -> mx.array:
    return mx.clip(x, low.astype(x.dtype), high.astype(x.dtype))


class Projector(Module):
    """Projects an encoder's rows to the decoder's width; `embed_vision` or `embed_audio` in
    checkpoints.
    """

    def __init__(self, inputs: int, outputs: int, eps: float) -> None:
        super().__init__()
        self.embedding_projection = nn.Linear(inputs, outputs, bias=False)
        self._norm = unweighted_norm(eps)

    def __call__(self, rows: mx.array, dtype: mx.Dtype) -> mx.array:
        """`[tokens, inputs]` -> `[tokens, outputs]` of `dtype`."""
        y: mx.array = self.embedding_projection(self._norm(rows).astype(dtype))
        return y
