"""LFM2-VL's way (arXiv:2511.23404, section 5) from squares of patches to rows; LFM3-VL's encoder.

That one has convolutions over a frame's patches in most layers, and attention over all of them in
the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from quire.models.base import Module
from quire.models.description import Norm
from quire.models.layers.convolution import padded
from quire.models.layers.encoder_attention import Neighbours, Parts
from quire.models.layers.rope import Rotate
from quire.models.vision.projectors import Layers, LayersProjector
from quire.models.vision.qwen import Block, Grid, QwenVision, VisionTower


@dataclass(frozen=True)
class LayersMerging:
    """By a norm of each patch, and a projector that reads the patches of a square together.

    Attributes:
        norm: None is the encoder's.
    """

    projector: LayersProjector
    norm: Norm | None = None

    def module(self, kind: QwenVision) -> Module:
        return LayersMerger(self, kind)


class LayersMerger(Layers):
    """Computes a `LayersMerging`."""

    def __init__(self, merging: LayersMerging, kind: QwenVision) -> None:
        self._width = kind.hidden_size * kind.merge**2
        super().__init__(merging.projector, self._width, kind.output_size)
        self.post_layernorm = (merging.norm or kind.norm).module(kind.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        """`[N, hidden]` -> `[N / merge ** 2, output_size]`."""
        return self.project(self.post_layernorm(x).reshape(-1, self._width))


@dataclass(frozen=True)
class Raster(Parts):
    """Frames, `count` of them, whose patches come square by square."""

    rows: int
    columns: int
    merge: int

    def in_rows(self, x: mx.array) -> mx.array:
        """`[N, width]` -> `[count, rows, columns, width]`."""
        m = self.merge
        cut = x.reshape(self.count, self.rows // m, self.columns // m, m, m, -1)
        return cut.swapaxes(2, 3).reshape(self.count, self.rows, self.columns, -1)

    def in_squares(self, x: mx.array) -> mx.array:
        """Return the way back."""
        m = self.merge
        cut = x.reshape(self.count, self.rows // m, m, self.columns // m, m, -1)
        return cut.swapaxes(2, 3).reshape(-1, x.shape[-1])


class SpatialConv(Module):
    """A convolution over the patches around, each channel for itself, between two gates."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self._kernel = kernel
        self.in_proj = nn.Linear(width, 3 * width, bias=False)
        self.kernel = mx.zeros((kernel, kernel, width))
        self.out_proj = nn.Linear(width, width, bias=False)

    def __call__(self, x: mx.array, rotate: Rotate, seen: Neighbours) -> mx.array:
        """`[N, hidden]` -> `[N, hidden]`; `seen` is a `Raster`."""
        assert isinstance(seen, Raster)
        before, after, value = mx.split(self.in_proj(x), 3, axis=-1)
        whole = padded(seen.in_rows(before * value), self._kernel, 1)
        weight, total = self.kernel.astype(x.dtype), mx.zeros((), x.dtype)
        for down in range(self._kernel):
            for across in range(self._kernel):
                part = whole[:, down : down + seen.rows, across : across + seen.columns]
                total = total + part * weight[down, across]
        y: mx.array = self.out_proj(after * seen.in_squares(total))
        return y


class LfmTower(VisionTower):
    """LFM3-VL's encoder.

    Args:
        convolved: layers with a convolution in the place of attention.
        kernel: patches on the side of what it sees.
    """

    def __init__(self, convolved: frozenset[int], kernel: int, kind: QwenVision) -> None:
        self._convolved, self._kernel = convolved, kernel
        super().__init__(kind)

    def _block(self, index: int) -> Block:
        if index not in self._convolved:
            return Block(self.kind)
        return Block(self.kind, SpatialConv(self.kind.hidden_size, self._kernel))

    def _neighbours(
        self, places: npt.NDArray[np.int64], grid: Grid
    ) -> tuple[Neighbours, Neighbours]:
        frames = Raster(*grid, self.kind.merge)
        return frames, frames
