"""PaddleOCR-VL's (arXiv:2510.14528) and Youtu-VL's merging of patches to rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from quire.models.base import MediaEncoder, Module
from quire.models.description import Norm
from quire.models.vision.qwen import Merger, QwenPictureEncoder, QwenVision, VisionTower


@dataclass(frozen=True)
class PaddleMerging:
    """Merges squares by the encoder's last norm, a second norm, and two linear layers.

    Attributes:
        norm: the second norm.
    """

    norm: Norm

    def module(self, kind: QwenVision) -> Module:
        return PaddleMerger(self, kind)


class PaddleMerger(Merger):
    """Computes a `PaddleMerging`."""

    def __init__(self, merging: PaddleMerging, kind: QwenVision) -> None:
        super().__init__(kind)
        self.norm = merging.norm.module(kind.hidden_size)
        self.post_layernorm = kind.norm.module(kind.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        """`[N, hidden]` -> `[N / merge ** 2, output_size]`."""
        return super().__call__(self.post_layernorm(x))


class PictureTower(VisionTower):
    """An encoder of pictures only."""

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        return {"image": QwenPictureEncoder(self)}
