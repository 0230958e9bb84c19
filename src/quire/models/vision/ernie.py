"""ERNIE 4.5 VL's vision encoder: squares of patches in pairs of frames become rows.

Frames are encoded one by one. A picture counts as two equal frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from quire.models.base import Encoding, Module
from quire.models.description import Norm
from quire.models.layers.common import ACTIVATIONS
from quire.models.vision.qwen import Grid, Merger, QwenVision, VisionTower

PAIR = 2
"""Number of frames of a moment."""


@dataclass(frozen=True)
class SpatialMerging:
    """Merges squares by a norm, two linear layers and a norm; rows keep a square's width."""

    def module(self, kind: QwenVision) -> Module:
        return SpatialMerger(kind)


class SpatialMerger(Merger):
    """Computes a `SpatialMerging`."""

    def __init__(self, kind: QwenVision) -> None:
        super().__init__(kind)
        self.linear_fc2 = nn.Linear(self._width, self._width)
        self.ln = kind.norm.module(self._width)

    def __call__(self, x: mx.array) -> mx.array:
        """`[N, hidden]` -> `[N / merge ** 2, hidden * merge ** 2]`."""
        y: mx.array = self.ln(super().__call__(x))
        return y


class TemporalMerger(Module):
    """Merges two rows at the same place in a pair of frames to one row of the decoder's width."""

    def __init__(self, kind: QwenVision, norm: Norm) -> None:
        super().__init__()
        width = kind.hidden_size * kind.merge**2
        self.linear_fc1 = nn.Linear(PAIR * width, width)
        self.linear_fc2 = nn.Linear(width, width)
        self.ln = kind.norm.module(width)
        self.mlp = nn.Linear(width, kind.output_size)
        self.after_norm = norm.module(kind.output_size)

    def __call__(self, x: mx.array) -> mx.array:
        """`[N, 2 * width]` -> `[N, output_size]`."""
        y = self.ln(self.linear_fc2(ACTIVATIONS["gelu"](self.linear_fc1(x))))
        z: mx.array = self.after_norm(self.mlp(y))
        return z


class ErnieTower(VisionTower):
    """The encoder; `norm` is the decoder's."""

    def __init__(self, norm: Norm, kind: QwenVision) -> None:
        super().__init__(kind)
        self.temporal = TemporalMerger(kind, norm)

    def encode(self, patches: mx.array, grid: Grid) -> Encoding:
        """Encode the frames of a video like `VisionTower`, then merge pairs of frames."""
        (x,) = yield from super().encode(patches, grid)
        frames = x.reshape(grid[0], -1, x.shape[-1])
        return (self._paired(frames[0::2], frames[1::2]),)

    def encode_pictures(self, patches: mx.array, grid: Grid) -> Encoding:
        """Encode pictures, each of which is both frames of a pair."""
        (x,) = yield from super().encode(patches, grid)
        return (self._paired(x, x),)

    def _paired(self, first: mx.array, second: mx.array) -> mx.array:
        pairs = mx.concatenate([first, second], axis=-1)
        y: mx.array = self.temporal(pairs.reshape(-1, pairs.shape[-1]))
        return y
