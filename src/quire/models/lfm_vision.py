"""How LFM2-VL (arXiv:2511.23404, section 5) brings squares of SigLIP's patches to rows."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from quire.models.base import Module
from quire.models.projectors import Layers, LayersProjector
from quire.models.qwen_vision import QwenVision


@dataclass(frozen=True)
class LayersMerging:
    """By the encoder's last norm, and a projector that reads the patches of a square together."""

    projector: LayersProjector

    def module(self, kind: QwenVision) -> Module:
        return LayersMerger(self, kind)


class LayersMerger(Layers):
    """Computes a `LayersMerging`."""

    def __init__(self, merging: LayersMerging, kind: QwenVision) -> None:
        self._width = kind.hidden_size * kind.merge**2
        super().__init__(merging.projector, self._width, kind.output_size)
        self.post_layernorm = kind.norm.module(kind.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        """`[N, hidden]` -> `[N / merge ** 2, output_size]`."""
        return self.project(self.post_layernorm(x).reshape(-1, self._width))
