"""Gemma 4's audio encoder: from a mel spectrogram to rows of the decoder's width (model cards).

It is a causal Conformer (arXiv:2005.08100), as in the Universal Speech Model (arXiv:2303.01037):
two convolutions keep a quarter of the frames, attention sees the last few rows with a bias by
distance (arXiv:1901.02860, appendix B), and so does each layer's convolution. Sounds are encoded
one at a time, without padding.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from quire.core.errors import ModelError, RequestError
from quire.core.media import Pieces
from quire.core.values import require
from quire.device.device import current_device
from quire.models.arguments import read_arguments
from quire.models.base import CutEncoder, Encoding, Module
from quire.models.layers.clipped import ClippedLinear, Projector
from quire.models.layers.common import ACTIVATIONS
from quire.models.layers.convolution import Convolution
from quire.models.layers.norm import LayerNorm, RMSNorm
from quire.models.settings import Settings

_NORM_EPS = 1e-6
"""Epsilon of the norms that `rms_norm_eps` does not cover."""
_LONGEST_PERIOD = 10_000.0


@dataclass(frozen=True)
class Gemma4AudioArguments:
    """The keys of `audio_config` that affect the computation, and the decoder's width.

    Attributes:
        text_hidden_size: width of the projector's rows; `hidden_size` of the text part.
        subsampling_conv_channels: channels of the two convolutions before the layers.
        residual_weight: factor of a feed-forward block's output.
        attention_chunk_size: rows of a block of attention.
        attention_context_left: one more than the number of rows that a row sees, including itself.
        attention_logit_cap: softcap of the logits, by a hyperbolic tangent.
        gradient_clipping: bound of hidden states where float16 might overflow.
        output_proj_dims: width of the encoder's output.
    """

    text_hidden_size: int
    hidden_size: int = 1024
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    hidden_act: str = "silu"
    subsampling_conv_channels: tuple[int, ...] = (128, 32)
    conv_kernel_size: int = 5
    residual_weight: float = 0.5
    attention_chunk_size: int = 12
    attention_context_left: int = 13
    attention_context_right: int = 0
    attention_logit_cap: float = 50.0
    use_clipped_linears: bool = True
    rms_norm_eps: float = 1e-6
    gradient_clipping: float = 1e10
    output_proj_dims: int = 1536

    def __post_init__(self) -> None:
        require("hidden_act", self.hidden_act, ACTIVATIONS)
        require("attention_context_right", self.attention_context_right, (0,))
        # Otherwise the number of distances would differ from the number of visible rows.
        require("attention_context_left", self.attention_context_left, (self.block + 1,))
        if len(self.subsampling_conv_channels) != 2:
            raise ModelError("config.json: subsampling_conv_channels are not two numbers")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Gemma4AudioArguments | None:
        """Read a multimodal configuration; None if it has no audio part.

        Raises:
            ModelError: a value is not supported.
        """
        s = Settings(config)
        audio = s.nested("audio_config", needed=False)
        if not audio.values:
            return None
        return read_arguments(
            cls,
            audio.values,
            text_hidden_size=s.within("text_config").values.get("hidden_size"),
            subsampling_conv_channels=audio.integers("subsampling_conv_channels") or None,
        )

    @property
    def block(self) -> int:
        """Rows of a block of attention. A row sees rows of its own block and the one before."""
        return self.attention_chunk_size

    @property
    def bins(self) -> int:
        """Number of the spectrogram's frequency bins."""
        return self.subsampling_conv_channels[0] // 4 * 4

    @property
    def seen(self) -> int:
        """Number of rows that a row sees, including itself."""
        return self.block

    @property
    def key_scale(self) -> float:
        """Factor of the keys."""
        return math.log(1 + math.e) / math.log(2)


class Subsampling(Module):
    """A convolution that halves frames and bins."""

    def __init__(self, inputs: int, outputs: int, eps: float) -> None:
        super().__init__()
        self.conv = Convolution(inputs, outputs, 3, stride=2, padding=1)
        self.norm = LayerNorm((outputs,), eps, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """`[1, frames, bins, inputs]` -> `[1, frames / 2, bins / 2, outputs]`, both rounded up."""
        return mx.maximum(self.norm(self.conv(x)), 0.0)


class SubsamplingProjection(Module):
    """Reduces the spectrogram's frames to a quarter as many rows.

    Args:
        layer: makes a convolution from its numbers of input and output channels; it halves frames
            and bins.
    """

    def __init__(self, args: Gemma4AudioArguments, layer: Callable[[int, int], Module]) -> None:
        super().__init__()
        first, second = args.subsampling_conv_channels
        self.layer0, self.layer1 = layer(1, first), layer(first, second)
        width = -(-args.bins // 4) * second
        self.input_proj_linear = nn.Linear(width, args.hidden_size, bias=False)

    def __call__(self, spectrogram: mx.array) -> mx.array:
        """`[frames, bins]` -> `[rows, hidden]`."""
        x = self.layer1(self.layer0(spectrogram[None, :, :, None]))[0]
        y: mx.array = self.input_proj_linear(x.reshape(x.shape[0], -1))
        return y


class Distances:
    """Relative positions for attention, shared by all layers.

    Attributes:
        table: `[block + 1, hidden]`, sines and cosines of the distances from 0 up.
        index: int32 `[block, 2 * block]`, the distance from each row of a block to each key of the
            block before and its own, as an index into `table`.
        visible: bool `[block, 2 * block]`, whether the row sees the key.
    """

    def __init__(self, args: Gemma4AudioArguments) -> None:
        timescales = args.hidden_size // 2
        step = math.log(_LONGEST_PERIOD) / max(timescales - 1, 1)
        turns = mx.arange(args.block + 1)[:, None] * mx.exp(mx.arange(timescales) * -step)
        self.table = mx.concatenate([mx.sin(turns), mx.cos(turns)], axis=-1)
        rows, keys = np.arange(args.block), np.arange(2 * args.block)
        distance = args.block + rows[:, None] - keys[None, :]
        self.index = mx.array(distance.clip(0, args.block).astype(np.int32))
        self.visible = mx.array((distance >= 0) & (distance < args.seen))


class Attention(Module):
    """Attention of each row to itself and the rows just before it, in float32 like transformers."""

    def __init__(self, args: Gemma4AudioArguments) -> None:
        super().__init__()
        hidden, clips = args.hidden_size, args.use_clipped_linears
        self._heads, self._block, self._cap = (
            args.num_attention_heads,
            args.block,
            args.attention_logit_cap,
        )
        self._key_scale, self._head_dim = args.key_scale, hidden // self._heads
        width = self._heads * self._head_dim
        self.q_proj = ClippedLinear(clips, hidden, width)
        self.k_proj = ClippedLinear(clips, hidden, width)
        self.v_proj = ClippedLinear(clips, hidden, width)
        self.post = ClippedLinear(clips, hidden, hidden)
        self.relative_k_proj = nn.Linear(hidden, width, bias=False)
        self.per_dim_scale = mx.zeros((self._head_dim,))

    def __call__(self, x: mx.array, distances: Distances) -> mx.array:
        """`[N, hidden]` -> `[N, hidden]`."""
        q_scale = self._head_dim**-0.5 / math.log(2)
        scale = q_scale * nn.softplus(self.per_dim_scale.astype(mx.float32))
        q = self._blocks(self.q_proj(x)) * scale  # [blocks, heads, block, head_dim]
        k = self._with_block_before(self._blocks(self.k_proj(x))) * self._key_scale
        v = self._with_block_before(self._blocks(self.v_proj(x)))
        relative = self.relative_k_proj(distances.table.astype(x.dtype)).astype(mx.float32)
        relative = relative.reshape(-1, self._heads, self._head_dim).transpose(1, 2, 0)
        by_distance = q @ relative  # [blocks, heads, block, distances]
        index = mx.broadcast_to(distances.index, (*by_distance.shape[:2], *distances.index.shape))
        logits = q @ k.swapaxes(-1, -2) + mx.take_along_axis(by_distance, index, axis=-1)
        logits = self._cap * current_device().operations.tanh(logits / self._cap)
        logits = mx.where(distances.visible & self._there(q.shape[0]), logits, -mx.inf)
        out = mx.softmax(logits, axis=-1) @ v
        rows = out.swapaxes(1, 2).reshape(-1, self._heads * self._head_dim)[: x.shape[0]]
        return self.post(rows.astype(x.dtype))

    def _blocks(self, x: mx.array) -> mx.array:
        """Split rows into blocks, padded with zeros: `[N, width]` -> float32 `[blocks, heads,
        block, head_dim]`.
        """
        padded = mx.pad(x.astype(mx.float32), [(0, -x.shape[0] % self._block), (0, 0)])
        return padded.reshape(-1, self._block, self._heads, self._head_dim).swapaxes(1, 2)

    def _with_block_before(self, x: mx.array) -> mx.array:
        """Prepend to each block the one before it: `[blocks, heads, block, head_dim]` -> `[blocks,
        heads, 2 * block, head_dim]`.
        """
        before = mx.concatenate([mx.zeros_like(x[:1]), x[:-1]])
        return mx.concatenate([before, x], axis=2)

    def _there(self, blocks: int) -> mx.array:
        """Return which keys exist, as the first block has none before it: bool `[blocks, 1, 1, 2 *
        block]`.
        """
        keys = mx.arange(blocks)[:, None] * self._block + mx.arange(2 * self._block)
        return (keys >= self._block)[:, None, None, :]


class FeedForward(Module):
    """A feed-forward block of half weight; a layer has two."""

    def __init__(self, args: Gemma4AudioArguments) -> None:
        super().__init__()
        hidden, clips = args.hidden_size, args.use_clipped_linears
        self.ffw_layer_1 = ClippedLinear(clips, hidden, 4 * hidden)
        self.ffw_layer_2 = ClippedLinear(clips, 4 * hidden, hidden)
        self.pre_layer_norm = RMSNorm(hidden, eps=_NORM_EPS)
        self.post_layer_norm = RMSNorm(hidden, eps=_NORM_EPS)
        self._activation = ACTIVATIONS[args.hidden_act]
        self._bound, self._weight = args.gradient_clipping, args.residual_weight

    def __call__(self, x: mx.array) -> mx.array:
        """`[N, hidden]` -> `[N, hidden]`."""
        y = self.ffw_layer_1(self.pre_layer_norm(_bounded(x, self._bound)))
        y = _bounded(self.ffw_layer_2(self._activation(y)), self._bound)
        return x + self.post_layer_norm(y) * self._weight


class LightConvolution(Module):
    """A gated convolution over the last few rows, separate for each channel."""

    def __init__(self, args: Gemma4AudioArguments) -> None:
        super().__init__()
        hidden, clips, size = args.hidden_size, args.use_clipped_linears, args.conv_kernel_size
        self.linear_start = ClippedLinear(clips, hidden, 2 * hidden)
        self.linear_end = ClippedLinear(clips, hidden, hidden)
        self.depthwise_conv1d = nn.Conv1d(hidden, hidden, size, groups=hidden, bias=False)
        self.pre_layer_norm = RMSNorm(hidden, eps=args.rms_norm_eps)
        self.conv_norm = RMSNorm(hidden, eps=args.rms_norm_eps)
        self._activation = ACTIVATIONS[args.hidden_act]
        self._bound, self._before = args.gradient_clipping, size - 1

    def __call__(self, x: mx.array) -> mx.array:
        """`[N, hidden]` -> `[N, hidden]`."""
        value, gate = mx.split(self.linear_start(self.pre_layer_norm(x)), 2, axis=-1)
        y = mx.pad(value * mx.sigmoid(gate), [(self._before, 0), (0, 0)])
        y = _bounded(self.depthwise_conv1d(y[None])[0], self._bound)
        return x + self.linear_end(self._activation(self.conv_norm(y)))


class ConformerLayer(Module):
    """A layer: feed-forward, attention, convolution, feed-forward."""

    def __init__(self, args: Gemma4AudioArguments) -> None:
        super().__init__()
        self.feed_forward1 = FeedForward(args)
        self.feed_forward2 = FeedForward(args)
        self.self_attn = Attention(args)
        self.lconv1d = LightConvolution(args)
        self.norm_pre_attn = RMSNorm(args.hidden_size, eps=_NORM_EPS)
        self.norm_post_attn = RMSNorm(args.hidden_size, eps=_NORM_EPS)
        self.norm_out = RMSNorm(args.hidden_size, eps=_NORM_EPS)
        self._bound = args.gradient_clipping

    def __call__(self, x: mx.array, distances: Distances) -> mx.array:
        """`[N, hidden]` -> `[N, hidden]`."""
        x = self.feed_forward1(x)
        y = self.self_attn(self.norm_pre_attn(_bounded(x, self._bound)), distances)
        x = x + self.norm_post_attn(_bounded(y, self._bound))
        x = self.feed_forward2(self.lconv1d(x))
        return self.norm_out(_bounded(x, self._bound))


class ConformerTower(Module):
    """The layers of a Conformer, which turn a spectrogram into rows.

    Args:
        subsampling: see `SubsamplingProjection`.
    """

    def __init__(
        self, args: Gemma4AudioArguments, subsampling: Callable[[int, int], Module]
    ) -> None:
        super().__init__()
        self.subsample_conv_projection = SubsamplingProjection(args, subsampling)
        self.layers = [ConformerLayer(args) for _ in range(args.num_hidden_layers)]
        self._distances = Distances(args)

    @property
    def dtype(self) -> mx.Dtype:
        """The activations' type, which is that of a tensor that is never quantised."""
        first: Any = self.subsample_conv_projection.layer0
        dtype: mx.Dtype = first.norm.weight.dtype
        return dtype

    def states(self, spectrogram: mx.array) -> Iterator[mx.array]:
        """Yield the output `[rows, hidden]` of each layer, for a float32 spectrogram `[frames,
        bins]`.
        """
        x = self.subsample_conv_projection(spectrogram.astype(self.dtype))
        for layer in self.layers:
            x = layer(x, self._distances)
            yield x


class AudioTower(ConformerTower):
    """Gemma 4's audio encoder, `audio_tower.` in checkpoints."""

    def __init__(self, args: Gemma4AudioArguments) -> None:
        super().__init__(args, partial(Subsampling, eps=args.rms_norm_eps))
        self.args = args
        self.output_proj = nn.Linear(args.hidden_size, args.output_proj_dims)


class ConformerEncoder(CutEncoder):
    """A tower and its projection as a `MediaEncoder`. Each layer is a piece, and so is the
    projection.
    """

    def __init__(self, audio_tower: ConformerTower) -> None:
        super().__init__()
        self.audio_tower = audio_tower

    @property
    def example_shape(self) -> tuple[int, ...]:
        return 100, self.audio_tower.args.bins

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * 4

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        return Pieces(len(self.audio_tower.layers) + 1, -(-shape[0] // 4))

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        x = spectrogram = features.view(mx.float32).reshape(shape)
        for x in self.audio_tower.states(spectrogram):
            yield (x,)
        return (self.embedded(x),)

    @abstractmethod
    def embedded(self, x: mx.array) -> mx.array:
        """Convert the last layer's rows `[rows, hidden]` to the decoder's embeddings."""


class Gemma4AudioEncoder(ConformerEncoder):
    """The tower and the projector, as a `MediaEncoder`."""

    def __init__(self, audio_tower: AudioTower, embed_audio: Projector) -> None:
        super().__init__(audio_tower)
        self.args = audio_tower.args
        self._output_proj, self._embed_audio = audio_tower.output_proj, embed_audio

    def rows(self, shape: tuple[int, ...]) -> int:
        frames, bins = shape
        if not frames or bins != self.args.bins:
            raise RequestError(
                f"A sound of {frames} frames of {bins} bins: the model takes {self.args.bins} bins."
            )
        return -(-frames // 4)

    def embedded(self, x: mx.array) -> mx.array:
        return self._embed_audio(self._output_proj(x), self.audio_tower.dtype)


def channels_last(name: str, array: mx.array) -> mx.array:
    """Return a convolution's weight in MLX's layout; other tensors unchanged.

    Transformers has the kernel's axes last, MLX the input channels. Kernels are 3 by 3, and the
    layers' own convolutions have one input channel.
    """
    if name.endswith("depthwise_conv1d.weight") and array.shape[1] == 1:
        return array.swapaxes(1, 2)
    if name.endswith(".conv.weight") and array.shape[2:] == (3, 3) and array.shape[1] != 3:
        return array.transpose(0, 2, 3, 1)
    return array


def _bounded(x: mx.array, bound: float) -> mx.array:
    """Clip `x` to `bound` and to the range of its type."""
    most = min(bound, float(mx.finfo(x.dtype).max))
    return mx.clip(x, -most, most)
