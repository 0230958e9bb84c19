"""Projectors from a vision transformer's rows to rows of the decoder's width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from quire.core.errors import ModelError
from quire.models.base import Module
from quire.models.description import Norm
from quire.models.layers.common import ACTIVATIONS, GATES
from quire.models.layers.convolution import Convolution


class Projector(Protocol):
    """Description of a projector of tiles; implementations are frozen dataclasses."""

    @property
    def square(self) -> int:
        """Patches on the side of a square that becomes one row."""
        ...

    def module(self, inputs: int, outputs: int) -> Module:
        """Return the module, which maps `[tiles, side, side, inputs]` to `[tiles, rows,
        outputs]`.
        """
        ...


@dataclass(frozen=True)
class PoolingProjector:
    """Averages squares, then normalises and projects them (Gemma 3, arXiv:2503.19786)."""

    square: int
    norm: Norm

    def module(self, inputs: int, outputs: int) -> Module:
        return Pooling(self, inputs, outputs)


class Pooling(Module):
    """Computes a `PoolingProjector`."""

    def __init__(self, kind: PoolingProjector, inputs: int, outputs: int) -> None:
        super().__init__()
        self._square = kind.square
        self.norm = kind.norm.module(inputs)
        self.linear = nn.Linear(inputs, outputs, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        pooled = squares(x, self._square).mean(axis=3)
        y: mx.array = self.linear(self.norm(pooled)).flatten(1, 2)
        return y


@dataclass(frozen=True)
class LinearProjector:
    """Projects concatenated squares by one matrix (Idefics 3, arXiv:2408.12637)."""

    square: int

    def module(self, inputs: int, outputs: int) -> Module:
        return Linear(self, inputs * self.square**2, outputs)


class Linear(Module):
    """Computes a `LinearProjector`."""

    def __init__(self, kind: LinearProjector, inputs: int, outputs: int) -> None:
        super().__init__()
        self._square = kind.square
        self.linear = nn.Linear(inputs, outputs, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(squares(x, self._square).flatten(3).flatten(1, 2))
        return y


@dataclass(frozen=True)
class LayersProjector:
    """Projects concatenated squares by two layers (LLaVA 1.5, arXiv:2310.03744; InternVL; Aya).

    Attributes:
        norm: norm before the first layer; None for none.
        width: output size of the first layer; None means the decoder's width.
        gated: whether the second half of the first layer's output, activated, multiplies the first
            half.
    """

    activation: str
    square: int = 1
    norm: Norm | None = None
    width: int | None = None
    gated: bool = False
    bias: bool = True

    def module(self, inputs: int, outputs: int) -> Module:
        return Layers(self, inputs * self.square**2, outputs)


class Layers(Module):
    """Computes a `LayersProjector`."""

    def __init__(self, kind: LayersProjector, inputs: int, outputs: int) -> None:
        super().__init__()
        self._kind = kind
        width = kind.width or outputs
        if kind.norm is not None:
            self.norm = kind.norm.module(inputs)
        self.linear_1 = nn.Linear(inputs, width, bias=kind.bias)
        self.linear_2 = nn.Linear(width // 2 if kind.gated else width, outputs, bias=kind.bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.project(squares(x, self._kind.square).flatten(3).flatten(1, 2))

    def project(self, x: mx.array) -> mx.array:
        """Project squares: `[..., inputs]` -> `[..., outputs]`."""
        kind = self._kind
        if kind.norm is not None:
            x = self.norm(x)
        x = self.linear_1(x)
        if kind.gated:
            value, gate = mx.split(x, 2, axis=-1)
            x = GATES[kind.activation](gate, value)
        else:
            x = ACTIVATIONS[kind.activation](x)
        y: mx.array = self.linear_2(x)
        return y


@dataclass(frozen=True)
class AdapterProjector:
    """Projects concatenated squares by two layers with activations, and a third one (Llama 4).

    Attributes:
        width: output size of the first two layers.
    """

    square: int
    width: int

    def module(self, inputs: int, outputs: int) -> Module:
        return Adapter(self, inputs * self.square**2, outputs)


class Adapter(Layers):
    """Computes an `AdapterProjector`."""

    def __init__(self, kind: AdapterProjector, inputs: int, outputs: int) -> None:
        first = LayersProjector("gelu", kind.square, width=kind.width, bias=False)
        super().__init__(first, inputs, kind.width)
        self.linear_3 = nn.Linear(kind.width, outputs, bias=False)

    def project(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear_3(ACTIVATIONS["gelu"](super().project(x)))
        return y


@dataclass(frozen=True)
class NarrowingProjector:
    """Halves a tile's sides twice by convolutions, and projects what is left (GOT-OCR 2.0,
    arXiv:2409.01704).
    """

    square = 4

    def module(self, inputs: int, outputs: int) -> Module:
        return Narrowing(inputs, outputs)


class Narrowing(Module):
    """Computes a `NarrowingProjector`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = Convolution(inputs, 2 * inputs, 3, stride=2, padding=1)
        self.conv2 = Convolution(2 * inputs, outputs, 3, stride=2, padding=1)
        self.linear = nn.Linear(outputs, outputs)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(self.conv2(self.conv1(x)).flatten(1, 2))
        return y


def squares(x: mx.array, size: int) -> mx.array:
    """Cut tiles into squares: `[tiles, side, side, width]` -> `[tiles, side / size, side / size,
    size * size, width]`.
    """
    tiles, side, _, width = x.shape
    count = side // size
    cut = x.reshape(tiles, count, size, count, size, width).swapaxes(2, 3)
    return cut.reshape(tiles, count, count, size * size, width)


def check_squares(side: int, size: int) -> None:
    """Refuse tiles that cannot be cut into squares.

    Raises:
        ModelError: they cannot; the message names both sizes.
    """
    if size < 1 or side % size:
        raise ModelError(
            f"config.json: tiles of {side} by {side} patches cannot be cut into squares of {size} "
            f"by {size}"
        )
