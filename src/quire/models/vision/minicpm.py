"""The encoder of MiniCPM-V 4.6: SigLIP, with windows that are merged behind one of its layers.

Each window of 2 by 2 patches becomes one patch there, so that later layers see a quarter of them.
At the end squares of 2 by 2 merged patches become rows. A square of the description is what
becomes a row, so it has 4 by 4 patches; without windows it has 2 by 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx

from quire.models.base import MediaEncoder, Module
from quire.models.layers.encoder_attention import Neighbours, Parts
from quire.models.layers.rope import Rotate
from quire.models.vision.lfm import LayersMerging
from quire.models.vision.projectors import LayersProjector
from quire.models.vision.qwen import (
    Block,
    QwenPictureEncoder,
    QwenVision,
    SelfAttention,
    VisionTower,
)

WINDOW = 2
"""Patches along each side of a window, and merged patches along each side of a square."""


@dataclass(frozen=True)
class WindowsMerging:
    """Merges squares of patches that are merged windows already, as `LayersMerging` does."""

    projector: LayersProjector

    def module(self, kind: QwenVision) -> Module:
        return LayersMerging(self.projector).module(replace(kind, merge=WINDOW))


class WindowMerger(Module):
    """Merges windows: attention within each, then two layers beside the mean of its patches."""

    def __init__(self, kind: QwenVision) -> None:
        super().__init__()
        self.norm1 = kind.norm.module(kind.hidden_size)
        self.attn = SelfAttention(kind)
        inner = WINDOW**2 * kind.mlp.width
        layers = LayersProjector("gelu_pytorch_tanh", norm=kind.norm, width=inner)
        self.mlp = layers.module(WINDOW**2 * kind.hidden_size, kind.hidden_size)

    def __call__(self, x: mx.array, rotate: Rotate) -> mx.array:
        """`[N, hidden]`, ordered by squares of 4 by 4 patches -> `[N / 4, hidden]`, by squares of
        2 by 2.
        """
        hidden = x.shape[-1]
        squares = x.reshape(-1, WINDOW, WINDOW, WINDOW, WINDOW, hidden)
        x = squares.swapaxes(2, 3).reshape(-1, hidden)  # window by window
        x = x + self.attn(self.norm1(x), rotate, Parts(len(x) // WINDOW**2))
        windows = x.reshape(-1, WINDOW**2, hidden)
        y: mx.array = self.mlp.project(windows.flatten(1)) + windows.mean(axis=1)
        return y


class MergingBlock(Block):
    """A layer whose output is merged by windows."""

    def __init__(self, kind: QwenVision) -> None:
        super().__init__(kind)
        self.merger = WindowMerger(kind)

    def __call__(self, x: mx.array, rotate: Rotate, seen: Neighbours) -> mx.array:
        """`[N, hidden]` -> `[N / 4, hidden]`."""
        y: mx.array = self.merger(super().__call__(x, rotate, seen), rotate)
        return y


class MiniCpmTower(VisionTower):
    """MiniCPM-V's encoder of pictures, and of a video's frames one by one.

    Args:
        merging: index of the layer whose output is merged by windows; None for none.
    """

    def __init__(self, merging: int | None, kind: QwenVision) -> None:
        self._merging = merging
        super().__init__(kind)

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        return dict.fromkeys(("image", "video"), QwenPictureEncoder(self))

    def _block(self, index: int) -> Block:
        return MergingBlock(self.kind) if index == self._merging else Block(self.kind)
