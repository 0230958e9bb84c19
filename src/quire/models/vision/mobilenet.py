"""MobileNetV5, Gemma 3n's vision encoder, as timm's `mobilenetv5_300m_enc`.

Its blocks are MobileNetV4's (arXiv:2404.10518): inverted bottlenecks with depthwise convolutions,
and attention with one KV head. Norms are over a pixel's channels. The outputs of the last two
stages are fused and pooled to a map of fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from quire.device.device import current_device
from quire.models.base import Encoding, Module
from quire.models.layers.common import ACTIVATIONS
from quire.models.layers.convolution import Convolution, padded
from quire.models.layers.norm import RMSNorm

_EPS = 1e-6
_STRIPS = 8
"""The most strips in which the last stages' maps are fused."""


class Block(Protocol):
    """Description of a block."""

    @property
    def channels(self) -> int:
        """Output channels."""
        ...

    def module(self, inputs: int) -> Module:
        """Return the module, which is called with `[1, rows, columns, inputs]`."""
        ...


@dataclass(frozen=True)
class EdgeBlock:
    """Description of a block: a convolution to more channels, then a projection to fewer.

    Attributes:
        expansion: factor of the number of channels between the two.
    """

    channels: int
    kernel: int
    stride: int
    expansion: float

    def module(self, inputs: int) -> Module:
        return EdgeResidual(self, inputs)


@dataclass(frozen=True)
class InvertedBlock:
    """Description of an inverted bottleneck.

    Attributes:
        start, middle: kernel sides of the convolutions before and between the projections; 0 means
            none.
        scaled: whether the output is multiplied by a learned vector before it is added.
    """

    channels: int
    start: int
    middle: int
    stride: int
    expansion: float
    scaled: bool = True

    def module(self, inputs: int) -> Module:
        return InvertedResidual(self, inputs)


@dataclass(frozen=True)
class AttentionBlock:
    """Description of attention over all pixels, with one KV head, of fewer pixels if `stride` > 1.

    Attributes:
        width: size of a head.
        kernel: kernel side of the convolutions that reduce the keys' and values' pixels.
    """

    channels: int
    heads: int
    width: int
    kernel: int
    stride: int

    def module(self, inputs: int) -> Module:
        return MobileAttention(self, inputs)


@dataclass(frozen=True)
class MobileNet:
    """Description of the encoder.

    Attributes:
        stem: channels of the first convolution, which halves the picture's sides.
        stages: the blocks of each stage.
        side: side of the output map, in pixels.
        output_size: channels of the output map.
    """

    stem: int
    stages: tuple[tuple[Block, ...], ...]
    side: int
    output_size: int

    @property
    def blocks(self) -> int:
        """Number of blocks in all stages."""
        return sum(map(len, self.stages))


def rounded(channels: float) -> int:
    """Round to the nearest multiple of 8, or to the next one if that would lose more than a
    tenth.
    """
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near


class Depthwise(Module):
    """A depthwise convolution."""

    def __init__(self, channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self._kernel, self._stride = kernel, stride
        self.weight = mx.zeros((channels, kernel, kernel, 1))

    def __call__(self, x: mx.array) -> mx.array:
        whole = padded(x, self._kernel, self._stride)
        return mx.conv2d(whole, self.weight, self._stride, groups=x.shape[-1])


class Normed(Module):
    """A convolution or projection followed by a norm, and by an activation if `active`."""

    def __init__(self, conv: nn.Module, channels: int, *, active: bool) -> None:
        super().__init__()
        self.conv = conv
        self.bn = RMSNorm(channels, _EPS)
        self._active = active

    def __call__(self, x: mx.array) -> mx.array:
        y = self.bn(self.conv(x))
        return ACTIVATIONS["gelu_pytorch_tanh"](y) if self._active else y


def _pointwise(inputs: int, outputs: int, *, active: bool) -> Normed:
    return Normed(nn.Linear(inputs, outputs, bias=False), outputs, active=active)


class Scale(Module):
    """Multiplies channels by a learned vector."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = mx.ones((channels,))

    def __call__(self, x: mx.array) -> mx.array:
        return x * self.gamma


class EdgeResidual(Module):
    """Computes an `EdgeBlock`."""

    def __init__(self, kind: EdgeBlock, inputs: int) -> None:
        super().__init__()
        inner = rounded(inputs * kind.expansion)
        self.conv_exp = Convolution(inputs, inner, kind.kernel, stride=kind.stride)
        self.bn1 = RMSNorm(inner, _EPS)
        self.conv_pwl = nn.Linear(inner, kind.channels, bias=False)
        self.bn2 = RMSNorm(kind.channels, _EPS)
        self._adds = kind.stride == 1 and inputs == kind.channels

    def __call__(self, x: mx.array) -> mx.array:
        y = ACTIVATIONS["gelu_pytorch_tanh"](self.bn1(self.conv_exp(x)))
        y = self.bn2(self.conv_pwl(y))
        return x + y if self._adds else y


class InvertedResidual(Module):
    """Computes an `InvertedBlock`."""

    def __init__(self, kind: InvertedBlock, inputs: int, *, adds: bool = True) -> None:
        super().__init__()
        self._kind, inner = kind, rounded(inputs * kind.expansion)
        if kind.start:
            stride = 1 if kind.middle else kind.stride
            first = Depthwise(inputs, kind.start, stride)
            self.dw_start = Normed(first, inputs, active=False)
        self.pw_exp = _pointwise(inputs, inner, active=True)
        if kind.middle:
            middle = Depthwise(inner, kind.middle, kind.stride)
            self.dw_mid = Normed(middle, inner, active=True)
        self.pw_proj = _pointwise(inner, kind.channels, active=False)
        if kind.scaled:
            self.layer_scale = Scale(kind.channels)
        self._adds = adds and kind.stride == 1 and inputs == kind.channels

    def __call__(self, x: mx.array) -> mx.array:
        y = self.dw_start(x) if self._kind.start else x
        y = self.pw_exp(y)
        y = self.dw_mid(y) if self._kind.middle else y
        y = self.pw_proj(y)
        y = self.layer_scale(y) if self._kind.scaled else y
        return x + y if self._adds else y


class KeysOrValues(Module):
    """The projection to keys or to values: one head, from all pixels or from fewer."""

    def __init__(self, kind: AttentionBlock, inputs: int) -> None:
        super().__init__()
        self._fewer = kind.stride > 1
        if self._fewer:
            self.down_conv = Depthwise(inputs, kind.kernel, kind.stride)
            self.norm = RMSNorm(inputs, _EPS)
        self.proj = nn.Linear(inputs, kind.width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """`[1, rows, columns, inputs]` -> `[1, pixels, 1, width]`."""
        x = self.norm(self.down_conv(x)) if self._fewer else x
        y: mx.array = self.proj(x).flatten(1, 2)[:, :, None]
        return y


class Projected(Module):
    """A projection under the name that checkpoints have for it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, outputs, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.proj(x)
        return y


class MultiQueryAttention(Module):
    """Attention of all pixels' queries to one head of keys and values (arXiv:1911.02150)."""

    def __init__(self, kind: AttentionBlock, inputs: int) -> None:
        super().__init__()
        self._kind = kind
        self.query = Projected(inputs, kind.heads * kind.width)
        self.key, self.value = KeysOrValues(kind, inputs), KeysOrValues(kind, inputs)
        self.output = Projected(kind.heads * kind.width, kind.channels)

    def __call__(self, x: mx.array) -> mx.array:
        """`[1, rows, columns, inputs]` -> `[1, rows, columns, channels]`."""
        _, rows, columns, _ = x.shape
        q = self.query(x).reshape(1, rows * columns, self._kind.heads, -1)
        k, v, scale = self.key(x), self.value(x), self._kind.width**-0.5
        out = current_device().operations.attend_groups(q, k, v, scale=scale)
        return self.output(out.reshape(1, rows, columns, -1))


class MobileAttention(Module):
    """Computes an `AttentionBlock`."""

    def __init__(self, kind: AttentionBlock, inputs: int) -> None:
        super().__init__()
        self.norm = RMSNorm(inputs, _EPS)
        self.attn = MultiQueryAttention(kind, inputs)
        self.layer_scale = Scale(kind.channels)
        self._adds = inputs == kind.channels

    def __call__(self, x: mx.array) -> mx.array:
        y = self.layer_scale(self.attn(self.norm(x)))
        return x + y if self._adds else y


class Fusion(Module):
    """Fuses the maps of two stages, the smaller one stretched, to a map of fixed size."""

    def __init__(self, kind: MobileNet) -> None:
        super().__init__()
        self._side = kind.side
        inputs = sum(stage[-1].channels for stage in kind.stages[-2:])
        inner = InvertedBlock(kind.output_size, 0, 0, stride=1, expansion=2.0, scaled=False)
        self.ffn = InvertedResidual(inner, inputs, adds=False)
        self.norm = RMSNorm(kind.output_size, _EPS)

    def encode(self, large: mx.array, small: mx.array) -> Encoding:
        """Fuse two maps `[1, rows, columns, channels]` to `[side * side, output_size]`, in
        strips.
        """
        rows, columns = large.shape[1:3]
        _, fewer, narrower, _ = small.shape
        stretched = small[:, mx.arange(rows) * fewer // rows]
        stretched = stretched[:, :, mx.arange(columns) * narrower // columns]
        both = mx.concatenate([large, stretched], axis=-1)
        down, across, width = rows // self._side, columns // self._side, len(self.norm.weight)
        made: list[mx.array] = []
        for number, strip in enumerate(mx.split(both, strips(self._side), axis=1)):
            if number:
                yield both, *made
            fused = self.ffn(strip).reshape(-1, down, self._side, across, width)
            made.append(self.norm(fused.mean(axis=(1, 3))))
        return (mx.concatenate(made).flatten(0, 1),)


def strips(side: int) -> int:
    """Return the number of strips into which a map is cut before it is pooled to `side` lines."""
    return max(count for count in range(1, _STRIPS + 1) if side % count == 0)


class MobileNetTower(Module):
    """Computes a `MobileNet`: `vision_tower.` in checkpoints."""

    def __init__(self, kind: MobileNet) -> None:
        super().__init__()
        self.kind = kind
        first = Convolution(3, kind.stem, 3, stride=2, bias=True)
        self.conv_stem = Normed(first, kind.stem, active=True)
        channels = kind.stem
        self.blocks: list[list[Module]] = []
        for stage in kind.stages:
            self.blocks.append([])
            for block in stage:
                self.blocks[-1].append(block.module(channels))
                channels = block.channels
        self.msfa = Fusion(kind)

    @property
    def pieces(self) -> int:
        """Pieces of `encode`: one per block, then strips of the fused map."""
        return self.kind.blocks + strips(self.kind.side)

    def encode(self, pixels: mx.array) -> Encoding:
        """Encode pixels, uint8 `[rows, columns, 3]`, to `[side * side, output_size]`.

        Colours are scaled to 0 to 1.
        """
        dtype = self.msfa.norm.weight.dtype
        x = self.conv_stem((pixels[None].astype(mx.float32) / 255).astype(dtype))
        last = len(self.blocks) - 1
        large: tuple[mx.array, ...] = ()  # output of the last stage but one
        for number, stage in enumerate(self.blocks):
            for block in stage:
                x = block(x)
                yield x, *large
            if number == last - 1:
                large = (x,)
        return (yield from self.msfa.encode(large[0], x))
