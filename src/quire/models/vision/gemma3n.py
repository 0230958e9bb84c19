"""Gemma 3n's vision encoder: MobileNetV5, the pixels of whose output map become rows (model
cards).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, Self

import mlx.core as mx

from quire.core.errors import ModelError, RequestError
from quire.core.media import Pieces
from quire.core.values import require
from quire.models.arguments import read_arguments
from quire.models.base import CutEncoder, Encoding
from quire.models.layers.gemma3n_embedder import Embedder, OwnVocabulary
from quire.models.settings import Settings
from quire.models.vision.mobilenet import (
    AttentionBlock,
    Block,
    EdgeBlock,
    InvertedBlock,
    MobileNet,
    MobileNetTower,
)

_ARCHITECTURE = "mobilenetv5_300m_enc"
_CELL = 16
"""Input pixels on the side of one pixel of the larger of the two fused maps."""
_MOST_PIXELS = 1536**2


@dataclass(frozen=True)
class Gemma3nVisionArguments(OwnVocabulary):
    """The keys of `vision_config` that affect the computation.

    Attributes:
        net: the encoder.
    """

    net: MobileNet
    hidden_size: int = 2048
    vocab_size: int = 128
    vocab_offset: int = 262_144
    text_hidden_size: int = 2048
    rms_norm_eps: float = 1e-6

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self | None:
        s = Settings(config)
        v = s.nested("vision_config", needed=False)
        if not v.values:
            return None
        v.only("architecture", _ARCHITECTURE)
        rows = s.integer("vision_soft_tokens_per_image", default=256)
        side = isqrt(rows)
        if side * side != rows:
            raise ModelError(f"config.json: vision_soft_tokens_per_image = {rows} is not a square")
        args = v.nested("model_args", needed=False)
        known = ("block_args", "stem_size", "msfa_output_resolution")
        for name in args.values:
            require("vision_config.model_args", name, known)
        args.only("msfa_output_resolution", side)
        net = MobileNet(
            stem=args.integer("stem_size", default=64),
            stages=tuple(tuple(map(_block, each)) for each in args.tables("block_args")) or _STAGES,
            side=side,
            output_size=v.integer("hidden_size", default=2048),
        )
        text = s.nested("text_config", needed=False)
        width = text.integer("hidden_size", default=2048)
        return read_arguments(cls, v.values, net=net, text_hidden_size=width)


def _block(args: Settings) -> Block:
    """Return a block from timm's names of its settings."""
    kind = args.word("block_type")
    require("block_type", kind, ("er", "uir", "mqa"))
    for name, neutral in _NEUTRAL.items():
        args.only(name, *neutral)
    channels, stride = args.integer("out_chs"), args.integer("stride")
    if kind == "mqa":
        key_dim = args.integer("key_dim")
        require("value_dim", args.integer("value_dim"), [key_dim])
        require("stride", stride, [1])
        heads, kernel = args.integer("num_heads"), args.integer("dw_kernel_size")
        return AttentionBlock(
            channels, heads, key_dim, kernel=kernel, stride=args.integer("kv_stride")
        )
    ratio = args.positive("exp_ratio")
    if kind == "er":
        return EdgeBlock(channels, args.integer("exp_kernel_size"), stride, expansion=ratio)
    start = args.integer("dw_kernel_size_start", minimum=0)
    return InvertedBlock(
        channels,
        start,
        args.integer("dw_kernel_size_mid", minimum=0),
        stride=stride,
        expansion=ratio,
    )


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "act_layer": (None,),
    "dw_kernel_size_end": (0,),
    "force_in_chs": (0,),
    "group_size": (None,),
    "noskip": (False,),
    "pw_kernel_size": (1,),
    "se_ratio": (0,),
}


def _published() -> tuple[tuple[Block, ...], ...]:
    """Return the stages of `mobilenetv5_300m_enc`."""

    def alternating(heads: int, width: int, stride: int, channels: int, count: int) -> list[Block]:
        attending = AttentionBlock(channels, heads, width, kernel=3, stride=stride)
        return [attending, InvertedBlock(channels, 0, 0, stride=1, expansion=2.0)] * count

    return (
        (EdgeBlock(128, 3, 2, expansion=4.0), *[EdgeBlock(128, 3, 1, expansion=4.0)] * 2),
        (
            InvertedBlock(256, 3, 5, stride=2, expansion=6.0),
            *(InvertedBlock(256, k, 0, stride=1, expansion=4.0) for k in (5, 3, 5, 3)),
        ),
        (
            InvertedBlock(640, 5, 5, stride=2, expansion=6.0),
            *[InvertedBlock(640, 5, 0, stride=1, expansion=4.0)] * 7,
            InvertedBlock(640, 0, 0, stride=1, expansion=1.0),
            *alternating(12, 64, 2, channels=640, count=14),
        ),
        (
            InvertedBlock(1280, 5, 5, stride=2, expansion=6.0),
            *alternating(16, 96, 1, channels=1280, count=19),
        ),
    )


_STAGES = _published()


class Gemma3nVisionEncoder(CutEncoder):
    """The tower and the embedder as a `MediaEncoder`. A piece is a block, or a strip of the fused
    map.
    """

    def __init__(self, vision_tower: MobileNetTower, embed_vision: Embedder) -> None:
        super().__init__()
        self.vision_tower = vision_tower
        self.embed_vision = embed_vision

    @property
    def example_shape(self) -> tuple[int, ...]:
        side = self.vision_tower.kind.side * _CELL
        return side, side

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        height, width = shape
        return height * width * 3

    def rows(self, shape: tuple[int, ...]) -> int:
        height, width = shape
        side = self.vision_tower.kind.side
        cell = side * _CELL
        if not 0 < height * width <= _MOST_PIXELS or height % cell or width % cell:
            raise RequestError(
                f"An image of {width} x {height} pixels: the model takes multiples of {cell}, and "
                f"at most {_MOST_PIXELS} pixels."
            )
        return side**2

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        height, width = shape
        return Pieces(self.vision_tower.pieces, height * width // _CELL**2)

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        (x,) = yield from self.vision_tower.encode(features.reshape(*shape, 3))
        return (self.embed_vision.soft(x * x.shape[-1] ** 0.5),)


def vision_tensors(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Convert the tower's tensors from timm's names after `vision_tower.` to this package's.

    Kernels have the channels second (PyTorch) or last (MLX). Kernels of one pixel become matrices.
    """
    second = any(a.ndim == 4 and a.shape[1] != a.shape[2] for a in weights.values())
    ready = {}
    for name, array in weights.items():
        if array.ndim == 4:
            array = array.moveaxis(1, -1) if second else array
            array = array.flatten(1) if array.shape[1] == 1 else array
        ready[name.replace("vision_tower.timm_model.", "vision_tower.")] = array
    return ready
