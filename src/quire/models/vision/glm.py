"""GLM-4V's and GLM-OCR's merging of patches to rows of the decoder's width (arXiv:2507.01006)."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from quire.models.base import Module
from quire.models.layers.common import ACTIVATIONS, GATES
from quire.models.layers.norm import LayerNorm
from quire.models.vision.qwen import QwenVision


@dataclass(frozen=True)
class GlmMerging:
    """Merges squares by a norm, one linear layer and a gated block.

    Attributes:
        width: inner width of the gated block.
    """

    width: int
    activation: str

    def module(self, kind: QwenVision) -> Module:
        return GlmMerger(self, kind)


class GlmMerger(Module):
    """Computes a `GlmMerging`."""

    def __init__(self, merging: GlmMerging, kind: QwenVision) -> None:
        super().__init__()
        self._inputs, outputs = kind.hidden_size * kind.merge**2, kind.output_size
        self._gate = GATES[merging.activation]
        self.norm = kind.norm.module(kind.hidden_size)
        self.downsample = nn.Linear(self._inputs, outputs)
        self.proj = nn.Linear(outputs, outputs, bias=False)
        self.post_projection_norm = LayerNorm((outputs,), 1e-5, bias=True)
        self.gate_proj = nn.Linear(outputs, merging.width, bias=False)
        self.up_proj = nn.Linear(outputs, merging.width, bias=False)
        self.down_proj = nn.Linear(merging.width, outputs, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """`[N, hidden]` -> `[N / merge ** 2, output_size]`."""
        squares = self.downsample(self.norm(x).reshape(-1, self._inputs))
        x = ACTIVATIONS["gelu"](self.post_projection_norm(self.proj(squares)))
        y: mx.array = self.down_proj(self._gate(self.gate_proj(x), self.up_proj(x)))
        return y
