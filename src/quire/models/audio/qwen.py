"""The audio encoder of Qwen3-Omni (arXiv:2509.17765): a mel spectrogram to the decoder's width.

Three convolutions leave an eighth of the frames of each chunk, one second long, which see nothing
of each other. A transformer follows, whose rows see those of their own window of some chunks, in
both directions. The places of rows are counted within a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
"""Through the layers, as whole windows: products of fewer rows are slower by the row."""
_CHUNKS_AT_ONCE = 16
"""Through the convolutions: their outputs take far more memory than the rows."""


@dataclass(frozen=True)
class QwenAudio:
    """The encoder, described.

    Attributes:
        bins: of the spectrogram.
        width: values between the two layers of a feed-forward.
        channels: of the convolutions.
        chunk: frames of a chunk.
        window: chunks whose rows see each other.
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
        """Chunks that are encoded together, of whole windows."""
        windows = max(1, _ROWS_AT_ONCE // (_eighth(self.chunk) * self.window))
        return windows * self.window

    def rows(self, frames: int) -> int:
        """Return the rows that so many frames become."""
        whole, rest = divmod(frames, self.chunk)
        return whole * _eighth(self.chunk) + _eighth(rest)


def _eighth(size: int) -> int:
    """Return the size that three convolutions of stride two leave."""
    return -(-size // 8)


class SelfAttention(Module):
    """All projections have biases."""

    def __init__(self, kind: QwenAudio) -> None:
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
        y: mx.array = self.out_proj(seen.attend(q, k, v, q.shape[-1] ** -0.5).reshape(n, -1))
        return y


class Block(Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, kind: QwenAudio) -> None:
        super().__init__()
        hidden = kind.hidden_size
        self.self_attn_layer_norm = LayerNorm((hidden,), 1e-5, True)
        self.self_attn = SelfAttention(kind)
        self.final_layer_norm = LayerNorm((hidden,), 1e-5, True)
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
    """A spectrogram to rows of the decoder's width, `audio_tower.` in checkpoints."""

    def __init__(self, kind: QwenAudio) -> None:
        super().__init__()
        self.kind = kind
        hidden, channels = kind.hidden_size, kind.channels
        self.conv2d1 = Convolution(1, channels, 3, 2, padding=1, bias=True)
        self.conv2d2 = Convolution(channels, channels, 3, 2, padding=1, bias=True)
        self.conv2d3 = Convolution(channels, channels, 3, 2, padding=1, bias=True)
        self.conv_out = nn.Linear(channels * _eighth(kind.bins), hidden, bias=False)
        self.layers = [Block(kind) for _ in range(kind.depth)]
        self.ln_post = LayerNorm((hidden,), 1e-5, True)
        self.proj1 = nn.Linear(hidden, hidden)
        self.proj2 = nn.Linear(hidden, kind.output_size)
        self._activation = ACTIVATIONS[kind.activation]

    def encode(self, spectrogram: mx.array) -> Encoding:
        """float32 `[frames, bins]` -> `[rows, output_size]`.

        Windows do not see each other, so a piece is a layer of a few of them.
        """
        kind, frames = self.kind, spectrogram.shape[0]
        # Published code fills the last chunk with zeros, unless it is the only one.
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
        """`[chunks, frames, bins]` -> `[chunks, rows, hidden]`, with their places."""
        parts: list[mx.array] = []
        for start in range(0, chunks.shape[0], _CHUNKS_AT_ONCE):
            # Each waits for the one before, so that one part's maps are in memory at a time.
            part = mx.depends([chunks[start : start + _CHUNKS_AT_ONCE]], parts[-1:])[0]
            x = part.swapaxes(1, 2)[..., None]  # [chunks, bins, frames, 1]
            for layer in (self.conv2d1, self.conv2d2, self.conv2d3):
                x = ACTIVATIONS["gelu"](layer(x))
            # Channel by channel, the bins of each: [chunks, rows, channels * bins]
            parts.append(self.conv_out(x.transpose(0, 2, 3, 1).flatten(2)))
        x = mx.concatenate(parts)
        return x + _places(x.shape[1], x.shape[2]).astype(x.dtype)


def _places(rows: int, hidden: int) -> mx.array:
    """Sines and cosines of each row's place, float32 `[rows, hidden]`."""
    pairs = hidden // 2
    step = math.log(_LONGEST_PERIOD) / max(pairs - 1, 1)
    turns = mx.arange(rows)[:, None] * mx.exp(mx.arange(pairs) * -step)
    return mx.concatenate([mx.sin(turns), mx.cos(turns)], axis=-1)


class QwenSoundEncoder(CutEncoder):
    """The tower for sounds. Their shape is frames and bins."""

    def __init__(self, audio_tower: AudioTower) -> None:
        super().__init__()
        self.audio_tower = audio_tower

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        frames, bins = shape
        return frames * bins * 4

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
    """Return the tower's tensors with convolutions as MLX has them; kernels are 3 by 3."""
    return {
        name: array.moveaxis(1, -1)
        if name.startswith("conv2d") and array.ndim == 4 and array.shape[1:3] != (3, 3)
        else array
        for name, array in weights.items()
    }
