"""Phi-4's projection of SigLIP's patches to the decoder's width."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from quire.models.base import Module
from quire.models.layers.common import ACTIVATIONS
from quire.models.vision.qwen import QwenVision


@dataclass(frozen=True)
class MLPMerging:
    """Projects each patch by two linear layers, without merging patches."""

    def module(self, kind: QwenVision) -> Module:
        return MLPMerger(kind)


class MLPMerger(Module):
    """Computes an `MLPMerging`."""

    def __init__(self, kind: QwenVision) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(kind.hidden_size, kind.output_size)
        self.linear_fc2 = nn.Linear(kind.output_size, kind.output_size)

    def __call__(self, x: mx.array) -> mx.array:
        """`[N, hidden]` -> `[N, output_size]`."""
        y: mx.array = self.linear_fc2(ACTIVATIONS["gelu"](self.linear_fc1(x)))
        return y
