"""Pixtral's vision encoder (arXiv:2410.07073), in the form of Mistral Small 3.1 and its successors.

Squares of patches become rows. A token of the decoder follows each line of rows; another one
follows the last line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from quire.models.base import Encoding, MediaEncoder, Module
from quire.models.description import Norm
from quire.models.layers.common import ACTIVATIONS, embed
from quire.models.vision.qwen import QwenPictureEncoder, QwenVision, VisionTower
from quire.models.vision.vision_language import TextPositionsModel

LINE_END, PICTURE_END = 12, 13
"""Ids of [IMG_BREAK] and [IMG_END], which configurations do not name."""


@dataclass(frozen=True)
class PixtralMerging:
    """Merges squares by a norm of each patch, one matrix over each square, and two linear layers.

    Attributes:
        activation: the activation between the layers.
        bias: whether the layers have biases.
    """

    norm: Norm
    activation: str
    bias: bool

    def module(self, kind: QwenVision) -> Module:
        return PixtralMerger(self, kind)


class PixtralMerger(Module):
    """Computes a `PixtralMerging`."""

    def __init__(self, merging: PixtralMerging, kind: QwenVision) -> None:
        super().__init__()
        width, outputs = kind.hidden_size, kind.output_size
        self._patches = kind.merge**2
        self._activation = ACTIVATIONS[merging.activation]
        self.norm = merging.norm.module(width)
        self.merging_layer = nn.Linear(width * self._patches, width, bias=False)
        self.linear_1 = nn.Linear(width, outputs, bias=merging.bias)
        self.linear_2 = nn.Linear(outputs, outputs, bias=merging.bias)

    def __call__(self, x: mx.array) -> mx.array:
        """`[N, hidden]` -> `[N / merge ** 2, output_size]`."""
        patches = self.norm(x).reshape(-1, self._patches, x.shape[-1])
        squares = patches.swapaxes(1, 2).flatten(1)  # channels are the outer axis
        y: mx.array = self.linear_2(self._activation(self.linear_1(self.merging_layer(squares))))
        return y


class PixtralPictureEncoder(QwenPictureEncoder):
    """The encoder of pictures; an item's shape is its rows and columns of patches.

    Args:
        table: the decoder's embedding table.
    """

    def __init__(self, visual: VisionTower, table: nn.Embedding) -> None:
        super().__init__(visual)
        self.table = table

    @property
    def takes_several(self) -> bool:
        return False  # rows end with the picture

    def rows(self, shape: tuple[int, ...]) -> int:
        return super().rows(shape) + shape[0] // self.visual.kind.merge

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        (x,) = yield from super().encode(features, shape)
        lines = x.reshape(shape[0] // self.visual.kind.merge, -1, x.shape[-1])
        tokens = mx.array([LINE_END] * (len(lines) - 1) + [PICTURE_END])
        ends = embed(self.table, tokens, x.dtype)[:, None]
        return (mx.concatenate([lines, ends], axis=1).flatten(0, 1),)


class PixtralModel(TextPositionsModel):
    """A decoder with Pixtral's encoder."""

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        if self.visual is None:
            return {}
        return {"image": PixtralPictureEncoder(self.visual, self.model.embed_tokens)}
