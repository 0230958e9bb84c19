"""HunyuanOCR's vision encoder (arXiv:2511.19575): Qwen2-VL's without rotation.

Two layers merge squares of patches to rows. A learned row ends each line, and learned rows surround
a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from quire.core.media import PlacedMedia
from quire.models.base import Module
from quire.models.description import Norm
from quire.models.layers.common import ACTIVATIONS
from quire.models.vision.qwen import Grid, QwenPictureEncoder, QwenVision, VisionTower


@dataclass(frozen=True)
class HunyuanMerging:
    """Merges squares by two linear layers and one more, between norms.

    Attributes:
        norm: the norm before and after.
    """

    norm: Norm
    activation: str

    def module(self, kind: QwenVision) -> Module:
        return HunyuanMerger(self, kind)


class HunyuanMerger(Module):
    """Computes a `HunyuanMerging`."""

    def __init__(self, merging: HunyuanMerging, kind: QwenVision) -> None:
        super().__init__()
        width, outputs = kind.hidden_size, kind.output_size
        self._inputs = width * kind.merge**2
        self._activation = ACTIVATIONS[merging.activation]
        self.norm = merging.norm.module(width)
        self.proj_conv = nn.Linear(self._inputs, 2 * width)
        self.proj_out = nn.Linear(2 * width, 4 * width)
        self.mlp = nn.Linear(4 * width, outputs)
        self.image_newline = mx.zeros(4 * width)
        self.image_begin, self.image_end = mx.zeros(outputs), mx.zeros(outputs)
        self.after_rms = merging.norm.module(outputs)

    def __call__(self, x: mx.array, columns: int) -> mx.array:
        """Merge `[N, hidden]`, ordered by squares, to `[rows, output_size]`.

        Args:
            columns: number of squares in a line.
        """
        squares = self.norm(x).reshape(-1, self._inputs)
        y = self.proj_out(self._activation(self.proj_conv(squares)))
        lines = y.reshape(-1, columns, y.shape[-1])
        ends = mx.broadcast_to(self.image_newline, (len(lines), 1, y.shape[-1])).astype(y.dtype)
        y = self.mlp(mx.concatenate([lines, ends], axis=1).flatten(0, 1))
        around = [each.astype(y.dtype)[None] for each in (self.image_begin, self.image_end)]
        whole: mx.array = self.after_rms(mx.concatenate([around[0], y, around[1]]))
        return whole


class HunyuanTower(VisionTower):
    """The encoder of patches to lines of rows."""

    def _merged(self, x: mx.array, grid: Grid) -> mx.array:
        y: mx.array = self.merger(x, grid[2] // self.kind.merge)
        return y


class HunyuanPictureEncoder(QwenPictureEncoder):
    """The encoder of pictures; an item's shape is its rows and columns of patches."""

    @property
    def takes_several(self) -> bool:
        return False  # rows begin and end with the picture

    def rows(self, shape: tuple[int, ...]) -> int:
        squares = super().rows(shape)
        return squares + shape[0] // self.visual.kind.merge + 2


def placed_by_picture(
    length: int, media: Sequence[PlacedMedia], merge: int, axes: int
) -> npt.NDArray[np.float32]:
    """Return the positions of a prompt's tokens, `[axes, length]`.

    The last three axes are a row's column and line in its picture, and the picture's number. On
    other axes, and for text and the rows around a picture, the position is the token's index.
    """
    positions = np.tile(np.arange(length, dtype=np.float32), (axes, 1))
    for number, placed in enumerate(media):
        lines, columns = (side // merge for side in placed.item.shape)
        line, column = np.indices((lines, columns + 1)).reshape(2, -1)
        inner = slice(placed.start + 1, placed.end - 1)
        positions[-3, inner], positions[-2, inner], positions[-1, inner] = column, line, number
    return positions
