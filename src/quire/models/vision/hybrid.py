"""The two vision encoders of DeepSeek-VL 7B (arXiv:2403.05525, section 3.1).

SigLIP encodes a small picture, SAM's encoder a large one, whose map is resized to SigLIP's.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from quire.core.errors import RequestError
from quire.core.media import Pieces
from quire.models.base import CutEncoder, Encoding, Module
from quire.models.layers.common import ACTIVATIONS
from quire.models.layers.convolution import Convolution
from quire.models.vision.place_table import Table
from quire.models.vision.sam import Neck, Sam, SamTower
from quire.models.vision.vit import VisionTower, VisionTransformer


class Reduction(Module):
    """Resizes a map to SigLIP's size, with four times the channels.

    Args:
        side: side of SigLIP's map, in patches.
    """

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self._side = side
        self.conv1 = Convolution(channels, 2 * channels, 3, stride=2, padding=1)
        self.conv2 = Convolution(2 * channels, 4 * channels, 3, stride=2, padding=1)

    def __call__(self, x: mx.array) -> mx.array:
        """`[1, any, any, channels]` -> `[1, side, side, 4 * channels]`."""
        weights = Table(x.shape[1], ends=False).matrix(4 * self._side)
        stretch = mx.array(weights).astype(x.dtype)
        x = mx.einsum("ai,bj,nijc->nabc", stretch, stretch, x)
        y: mx.array = self.conv2(self.conv1(x))
        return y


class Aligner(Module):
    """Concatenates both encoders' projected rows, and applies a linear layer."""

    def __init__(self, low: int, high: int, width: int) -> None:
        super().__init__()
        self.vision_proj = nn.Linear(low, width // 2)
        self.high_res_vision_proj = nn.Linear(high, width // 2)
        self.proj = nn.Linear(width, width)

    def __call__(self, low: mx.array, high: mx.array) -> mx.array:
        """Join `[patches, low]` and `[patches, high]` to `[patches, width]`."""
        both = mx.concatenate([self.high_res_vision_proj(high), self.vision_proj(low)], axis=-1)
        y: mx.array = self.proj(ACTIVATIONS["gelu"](both))
        return y


class HybridVision(Module):
    """Both encoders and the layers that join them, with the checkpoint's names."""

    def __init__(self, low: VisionTransformer, high: Sam, width: int) -> None:
        super().__init__()
        self.vision_model = VisionTower(low)
        self.high_res_vision_model = SamTower(high)
        self.high_res_vision_neck = Neck(high)
        self.high_res_vision_proj = Reduction(high.channels, low.side)
        self.high_res_vision_alpha = mx.zeros(1)
        self.aligner = Aligner(low.output_size, 4 * high.channels, width)


class HybridEncoder(CutEncoder):
    """The encoder of a picture in two sizes; an item's shape is `(1,)`. A piece is a layer."""

    def __init__(self, visual: HybridVision) -> None:
        super().__init__()
        self.visual = visual

    @property
    def example_shape(self) -> tuple[int, ...]:
        return (1,)

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        visual = self.visual
        return visual.high_res_vision_model.kind.tile_bytes + visual.vision_model.kind.tile_bytes

    def rows(self, shape: tuple[int, ...]) -> int:
        if shape != (1,):
            raise RequestError(f"An image of shape {shape} is not one picture.")
        return self.visual.vision_model.kind.patches

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        high, low = self.visual.high_res_vision_model.kind, self.visual.vision_model.kind
        return Pieces(high.depth + low.depth + 1, high.side**2)

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        visual = self.visual
        tower, low = visual.high_res_vision_model, visual.vision_model.kind
        large, small = mx.split(features, [tower.kind.tile_bytes])
        last, first = yield from tower.encode(large.reshape(1, tower.kind.side**2, -1))
        reduced = visual.high_res_vision_proj(last)
        earlier = visual.high_res_vision_proj(visual.high_res_vision_neck(first))
        high = (reduced + earlier * visual.high_res_vision_alpha).reshape(low.patches, -1)
        encoding = visual.vision_model.encode(small.reshape(1, low.patches, -1))
        while True:
            try:
                yield *next(encoding), high
            except StopIteration as end:
                (tile,) = end.value
                break
        return (visual.aligner(tile[0], high),)
