"""The audio encoder of Whisper (arXiv:2212.04356, section 2.2): a mel spectrogram to rows that the
decoder attends to.

Two convolutions over time halve the frames. A transformer follows, whose rows all see each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import mlx.core as mx
import mlx.nn as nn

from quire.core.errors import ModelError, RequestError
from quire.core.media import Pieces
from quire.device.device import current_device
from quire.models.audio.qwen import Block
from quire.models.base import CutEncoder, Encoding, Module
from quire.models.layers.common import ACTIVATIONS
from quire.models.layers.encoder_attention import Parts
from quire.models.layers.norm import LayerNorm

_KERNEL = 3


@dataclass(frozen=True)
class WhisperAudio:
    """The encoder, described.

    Attributes:
        bins: of the spectrogram.
        rows: of the encoder's output; the spectrogram has twice as many frames.
        width: values between the two layers of a feed-forward.
    """

    bins: int
    rows: int
    depth: int
    hidden_size: int
    heads: int
    width: int
    activation: str

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise ModelError(
                f"config.json: {self.heads} heads of an audio encoder of width {self.hidden_size}"
            )


class TimeConvolution(Module):
    """A convolution over time and all channels, with a zero on both sides, as one product."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self._stride = stride
        self.weight = mx.zeros((outputs, _KERNEL, inputs))
        self.bias = mx.zeros(outputs)

    def __call__(self, x: mx.array) -> mx.array:
        """`[frames, inputs]` -> `[frames / stride, outputs]`."""
        frames, padded = len(x), mx.pad(x, [(1, 1), (0, 0)])
        seen = [padded[shift : shift + frames : self._stride] for shift in range(_KERNEL)]
        multiply = current_device().operations.linear
        return multiply(mx.concatenate(seen, axis=-1), self.weight.flatten(1), self.bias)


class AudioTower(Module):
    """A spectrogram to rows of the decoder's width, `model.encoder.` in checkpoints."""

    def __init__(self, kind: WhisperAudio) -> None:
        super().__init__()
        self.kind = kind
        hidden = kind.hidden_size
        self.conv1 = TimeConvolution(kind.bins, hidden, stride=1)
        self.conv2 = TimeConvolution(hidden, hidden, stride=2)
        self.embed_positions = nn.Embedding(kind.rows, hidden)
        self.layers = [Block(kind) for _ in range(kind.depth)]
        self.layer_norm = LayerNorm((hidden,), 1e-5, bias=True)
        self._activation = ACTIVATIONS["gelu"]

    def encode(self, spectrogram: mx.array) -> Encoding:
        """float32 `[frames, bins]` -> `[rows, hidden]`. A piece is a layer."""
        x = spectrogram.astype(self.layer_norm.weight.dtype)
        x = self._activation(self.conv2(self._activation(self.conv1(x))))
        x = x + self.embed_positions.weight.astype(x.dtype)
        for layer in self.layers:
            x = layer(x, Parts(1))
            yield (x,)
        return (self.layer_norm(x),)


class WhisperSoundEncoder(CutEncoder):
    """The tower for sounds, which the decoder attends to. Their shape is frames and bins."""

    def __init__(self, tower: AudioTower) -> None:
        super().__init__()
        self.tower = tower

    @property
    def example_shape(self) -> tuple[int, ...]:
        return 2 * self.tower.kind.rows, self.tower.kind.bins

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        return prod(shape) * 4

    def rows(self, shape: tuple[int, ...]) -> int:
        kind = self.tower.kind
        if shape != (2 * kind.rows, kind.bins):
            raise RequestError(
                f"A sound of {shape[0]} frames of {shape[1]} bins: the model takes "
                f"{2 * kind.rows} frames of {kind.bins} bins."
            )
        return 1

    def cross_keys(self, shape: tuple[int, ...]) -> int:
        return self.tower.kind.rows

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        kind = self.tower.kind
        return Pieces(kind.depth + 1, kind.rows)

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        return (yield from self.tower.encode(features.view(mx.float32).reshape(shape)))
