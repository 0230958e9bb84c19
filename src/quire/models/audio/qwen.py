"""Qwen3-Omni's audio encoder (arXiv:2509.17765): from a mel spectrogram to the decoder's width.

Three convolutions keep an eighth of the frames of each chunk, one second long; chunks are
independent there. A transformer follows, whose rows see their own window of a few chunks, in both
directions. Positions of rows are counted within a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from quire.core.errors import ModelError, RequestError
from quire.core.media import Pieces
from quire.models.base import CutEncoder, Encoding, Module
from quire.models.layers.common import ACTIVATIONS
from quire.models.layers.convolution import Convolution
from quire.models.layers.encoder_attention import Neighbours, Windows
from quire.models.layers.norm import LayerNorm

_LONGEST_PERIOD = 10_000.0
_ROWS_AT_ONCE = 512
"""Rows that go through the layers together, in whole windows: products of fewer rows are slower per
row.
"""
_CHUNKS_AT_ONCE = 16
"""Chunks that go through the convolutions together: their outputs need far more memory than the
rows.
"""


@dataclass(frozen=True)
class QwenAudio:
    """Sizes of the encoder.

    Attributes:
        bins: number of bins of the spectrogram.
        width: inner width of a feed-forward block.
        channels: channels of the convolutions.
        chunk: number of frames of a chunk.
        window: number of chunks whose rows see each other.
        output_size: the decoder's width.
    """

    bins: int
    depth: int
    hidden_size: int
    heads: int
    width: int
    channels: int
    chunk: int
    window: int
    activation: str
    output_size: int

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads or self.hidden_size % 2:
            raise ModelError(
                f"config.json: {self.heads} heads of an audio encoder of width {self.hidden_size}"
            )

    @property
    def chunks_at_once(self) -> int:
        """Chunks that are encoded together, in whole windows."""
        windows = max(1, _ROWS_AT_ONCE // (_eighth(self.chunk) * self.window))
        return windows * self.window

    def rows(self, frames: int) -> int:
        """Return the number of rows for a number of frames."""
        whole, rest = divmod(frames, self.chunk)
        return whole * _eighth(self.chunk) + _eighth(rest)


def _eighth(size: int) -> int:
    """Return the size after three convolutions of stride two."""
    return -(-size // 8)


class BlockKind(Protocol):
    """Sizes of a transformer block of the encoder; see `QwenAudio`."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def activation(self) -> str: ...


class SelfAttention(Module):
    """Self-attention with biases in all projections."""

    def __init__(self, kind: BlockKind) -> None:
        super().__init__()
        self._heads, hidden = kind.heads, kind.hidden_size
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, hidden)
        self.v_proj = nn.Linear(hidden, hidden)
        self.out_proj = nn.Linear(hidden, hidden)

    def __call__(self, x: mx.array, seen: Neighbours) -> mx.array:
        """`[N, hidden]` -> `[N, hidden]`."""
        n, heads = x.shape[0], self._heads
        q, k, v = (
            project(x).reshape(n, heads, -1) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y: mx.array = self.out_proj(seen.attend(q, k, v, scale=q.shape[-1] ** -0.5).reshape(n, -1))
        return y


class Block(Module):
    """A layer: attention and feed-forward, each after a norm, as in Whisper."""

    def __init__(self, kind: BlockKind) -> None:
        super().__init__()
        hidden = kind.hidden_size
        self.self_attn_layer_norm = LayerNorm((hidden,), 1e-5, bias=True)
        self.self_attn = SelfAttention(kind)
        self.final_layer_norm = LayerNorm((hidden,), 1e-5, bias=True)
        self.fc1 = nn.Linear(hidden, kind.width)
        self.fc2 = nn.Linear(kind.width, hidden)
        self._activation = ACTIVATIONS[kind.activation]

    def __call__(self, x: mx.array, seen: Neighbours) -> mx.array:
        """`[N, hidden]` -> `[N, hidden]`."""
        x = x + self.self_attn(self.self_attn_layer_norm(x), seen)
        x = x + self.fc2(self._activation(self.fc1(self.final_layer_norm(x))))
        if x.dtype == mx.float16:  # as published, against overflow
            most = float(mx.finfo(mx.float16).max) - 1000
            x = mx.clip(x, -most, most)
        return x


class AudioTower(Module):
    """The encoder of sound, `audio_tower.` in checkpoints."""

    def __init__(self, kind: QwenAudio) -> None:
        super().__init__()
        self.kind = kind
        hidden, channels = kind.hidden_size, kind.channels
        self.conv2d1 = Convolution(1, channels, 3, stride=2, padding=1, bias=True)
        self.conv2d2 = Convolution(channels, channels, 3, stride=2, padding=1, bias=True)
        self.conv2d3 = Convolution(channels, channels, 3, stride=2, padding=1, bias=True)
        self.conv_out = nn.Linear(channels * _eighth(kind.bins), hidden, bias=False)
        self.layers = [Block(kind) for _ in range(kind.depth)]
        self.ln_post = LayerNorm((hidden,), 1e-5, bias=True)
        self.proj1 = nn.Linear(hidden, hidden)
        self.proj2 = nn.Linear(hidden, kind.output_size)
        self._activation = ACTIVATIONS[kind.activation]

    def encode(self, spectrogram: mx.array) -> Encoding:
        """Encode a float32 spectrogram `[frames, bins]` to `[rows, output_size]`.

        Windows are independent, so a piece is one layer of a few windows.
        """
        kind, frames = self.kind, spectrogram.shape[0]
        # The published code pads the last chunk with zeros, unless it is the only one.
        size = min(frames, kind.chunk)
        filled = mx.pad(spectrogram, [(0, -frames % size), (0, 0)])
        chunks = filled.reshape(-1, size, kind.bins).astype(self.ln_post.weight.dtype)
        window, left = _eighth(size) * kind.window, kind.rows(frames)
        parts: list[mx.array] = []
        for first in range(0, len(chunks), kind.chunks_at_once):
            if parts:
                yield (parts[-1],)
            x = self._convolved(chunks[first : first + kind.chunks_at_once]).flatten(0, 1)[:left]
            left -= len(x)
            seen = Windows.of(np.arange(len(x)) // window)
            for layer in self.layers:
                x = layer(x, seen)
                yield (x,)
            parts.append(self.proj2(self._activation(self.proj1(self.ln_post(x)))))
        return (mx.concatenate(parts),)

    def _convolved(self, chunks: mx.array) -> mx.array:
        """Apply the convolutions and add positions: `[chunks, frames, bins]` -> `[chunks, rows,
        hidden]`.
        """
        parts: list[mx.array] = []
        for start in range(0, chunks.shape[0], _CHUNKS_AT_ONCE):
            # Each part depends on the one before, so that only one part's outputs are in memory.
            part = mx.depends([chunks[start : start + _CHUNKS_AT_ONCE]], parts[-1:])[0]
            x = part.swapaxes(1, 2)[..., None]  # [chunks, bins, frames, 1]
            for layer in (self.conv2d1, self.conv2d2, self.conv2d3):
                x = ACTIVATIONS["gelu"](layer(x))
            # Channel by channel, the bins of each: [chunks, rows, channels * bins]
            parts.append(self.conv_out(x.transpose(0, 2, 3, 1).flatten(2)))
        x = mx.concatenate(parts)
        return x + _places(x.shape[1], x.shape[2]).astype(x.dtype)


def _places(rows: int, hidden: int) -> mx.array:
    """Return sines and cosines of each row's position, float32 `[rows, hidden]`."""
    pairs = hidden // 2
    step = math.log(_LONGEST_PERIOD) / max(pairs - 1, 1)
    turns = mx.arange(rows)[:, None] * mx.exp(mx.arange(pairs) * -step)
    return mx.concatenate([mx.sin(turns), mx.cos(turns)], axis=-1)


class QwenSoundEncoder(CutEncoder):
    """The encoder of sounds as a `MediaEncoder`. An item's shape is frames and bins."""

    def __init__(self, audio_tower: AudioTower) -> None:
        super().__init__()
        self.audio_tower = audio_tower

    @property
    def example_shape(self) -> tuple[int, ...]:
        return 100, self.audio_tower.kind.bins

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * 4

    def rows(self, shape: tuple[int, ...]) -> int:
        frames, bins = shape
        kind = self.audio_tower.kind
        if not frames or bins != kind.bins:
            raise RequestError(
                f"A sound of {frames} frames of {bins} bins: the model takes {kind.bins} bins."
            )
        return kind.rows(frames)

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        kind, (frames, _) = self.audio_tower.kind, shape
        together = kind.chunks_at_once * kind.chunk
        parts = -(-frames // together)
        return Pieces(parts * (kind.depth + 1), kind.rows(min(frames, together)))

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        spectrogram = features.view(mx.float32).reshape(shape)
        return (yield from self.audio_tower.encode(spectrogram))


def channels_last(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the tower's tensors with convolutions in MLX's layout; kernels are 3 by 3."""
    return {
        name: array.moveaxis(1, -1)
        if name.startswith("conv2d") and array.ndim == 4 and array.shape[1:3] != (3, 3)
        else array
        for name, array in weights.items()
    }
