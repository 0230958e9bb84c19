"""LFM2-VL's merging of patches to rows (arXiv:2511.23404, section 5), and LFM3-VL's encoder.

Most layers of LFM3-VL's encoder have convolutions over a frame's patches, the others attention.
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
    """Merges squares by a norm of each patch, and a projector over the patches of a square.

    Attributes:
        norm: the norm; None means the encoder's.
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
    """Groups of rows that are `count` frames, whose patches are ordered by squares."""

    rows: int
    columns: int
    merge: int

    def in_rows(self, x: mx.array) -> mx.array:
        """Reorder patches from squares to lines: `[N, width]` -> `[count, rows, columns,
        width]`.
        """
        m = self.merge
        cut = x.reshape(self.count, self.rows // m, self.columns // m, m, m, -1)
        return cut.swapaxes(2, 3).reshape(self.count, self.rows, self.columns, -1)

    def in_squares(self, x: mx.array) -> mx.array:
        """Reorder patches from lines to squares, the inverse of `in_rows`."""
        m = self.merge
        cut = x.reshape(self.count, self.rows // m, m, self.columns // m, m, -1)
        return cut.swapaxes(2, 3).reshape(-1, x.shape[-1])


class SpatialConv(Module):
    """A depthwise convolution over neighbouring patches, between two gates."""

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
        convolved: indices of layers with a convolution instead of attention.
        kernel: side of the convolution's kernel, in patches.
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
