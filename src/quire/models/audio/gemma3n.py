"""Gemma 3n's audio encoder: Gemma 4's Conformer with other convolutions (model cards).

The convolutions look ahead, and are normalised over all frames so far. Each sound becomes the same
number of rows: it is padded with the embedding of a token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import mlx.core as mx

from quire.core.errors import ModelError, RequestError
from quire.models.arguments import read_arguments
from quire.models.audio.gemma4 import ConformerEncoder, ConformerTower, Gemma4AudioArguments
from quire.models.base import Module
from quire.models.layers.convolution import Convolution
from quire.models.layers.gemma3n_embedder import Embedder
from quire.models.settings import Settings
from quire.models.weights.names import renamed


@dataclass(frozen=True)
class Gemma3nAudioArguments(Gemma4AudioArguments):
    """The keys of `audio_config` that affect the computation.

    Attributes:
        input_feat_size: number of bins of the spectrogram.
        conf_reduction_factor: after the layers, one of this many rows is kept.
        sscp_conv_group_norm_eps: epsilon of the convolutions' norms.
        vocab_size, vocab_offset: number and first id of the tokens embedded by this encoder.
        rows: number of rows of every sound.
        padding: the token whose embedding pads a sound.
    """

    use_clipped_linears: bool = False
    input_feat_size: int = 128
    conf_reduction_factor: int = 4
    sscp_conv_group_norm_eps: float = 1e-3
    vocab_size: int = 128
    vocab_offset: int = 262_272
    rows: int = 188
    padding: int = 262_399

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.padding - self.vocab_offset < self.vocab_size:
            raise ModelError(
                f"config.json: token {self.padding} is not among the {self.vocab_size} tokens of "
                f"audio_config, which start at {self.vocab_offset}"
            )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self | None:
        s = Settings(config)
        a = s.nested("audio_config", needed=False)
        if not a.values:
            return None
        a.only("sscp_conv_kernel_size", [[3, 3], [3, 3]])
        a.only("sscp_conv_stride_size", [[2, 2], [2, 2]])
        named = {ours: a.values.get(theirs) for theirs, ours in _KEYS.items()}
        text = s.nested("text_config", needed=False)
        return read_arguments(
            cls,
            a.values,
            **named,
            text_hidden_size=text.integer("hidden_size", default=2048),
            hidden_size=a.integer("hidden_size", default=1536),
            subsampling_conv_channels=a.integers("sscp_conv_channel_size") or None,
            use_clipped_linears=False,
            rows=config.get("audio_soft_tokens_per_image"),
            padding=text.integer("vocab_size", default=262_400) - 1,
        )

    @property
    def bins(self) -> int:
        return self.input_feat_size

    @property
    def seen(self) -> int:
        return self.attention_context_left

    @property
    def key_scale(self) -> float:
        return 1.0


_KEYS = {
    "conf_attention_chunk_size": "attention_chunk_size",
    "conf_attention_context_left": "attention_context_left",
    "conf_attention_context_right": "attention_context_right",
    "conf_attention_logit_cap": "attention_logit_cap",
    "conf_num_attention_heads": "num_attention_heads",
    "conf_num_hidden_layers": "num_hidden_layers",
    "conf_conv_kernel_size": "conv_kernel_size",
    "conf_residual_weight": "residual_weight",
}


class CumulativeNorm(Module):
    """Normalises each frame by the mean and variance of itself and all frames before it."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((channels,))
        self._eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """`[1, frames, bins, channels]` -> the same."""
        _, frames, bins, channels = x.shape
        wide = x.astype(mx.float32)
        count = mx.arange(1, frames + 1)[None, :, None, None] * (bins * channels)
        mean = mx.cumsum(wide.sum(axis=(2, 3), keepdims=True), axis=1) / count
        apart = mx.square(wide - mean).sum(axis=(2, 3), keepdims=True)
        variance = mx.cumsum(apart, axis=1) / count
        y = (wide - mean) * mx.rsqrt(variance + self._eps) * self.weight.astype(mx.float32)
        return y.astype(x.dtype)


class Subsampling(Module):
    """A convolution that halves frames and bins, and looks two frames ahead."""

    def __init__(self, inputs: int, outputs: int, eps: float) -> None:
        super().__init__()
        self.conv = Convolution(inputs, outputs, 3, stride=2, padding=0)
        self.norm = CumulativeNorm(outputs, eps)

    def __call__(self, x: mx.array) -> mx.array:
        """`[1, frames, bins, inputs]` -> `[1, frames / 2, bins / 2, outputs]`, both rounded up."""
        padded = mx.pad(x, [(0, 0), (0, 2), (1, 1), (0, 0)])
        return mx.maximum(self.norm(self.conv(padded)), 0.0)


class Gemma3nAudioTower(ConformerTower):
    """Gemma 3n's audio encoder, `audio_tower.` in checkpoints."""

    def __init__(self, args: Gemma3nAudioArguments) -> None:
        super().__init__(args, partial(Subsampling, eps=args.sscp_conv_group_norm_eps))
        self.args = args


class Gemma3nAudioEncoder(ConformerEncoder):
    """The tower and the embedder, as a `MediaEncoder`."""

    def __init__(self, audio_tower: Gemma3nAudioTower, embed_audio: Embedder) -> None:
        super().__init__(audio_tower)
        self.args = audio_tower.args
        self._embed_audio = embed_audio

    def rows(self, shape: tuple[int, ...]) -> int:
        frames, bins = shape
        args = self.args
        most = args.rows * 4 * args.conf_reduction_factor
        if not 0 < frames <= most or bins != args.bins:
            raise RequestError(
                f"A sound of {frames} frames of {bins} bins: the model takes {args.bins} bins, and "
                f"at most {most} frames."
            )
        return args.rows

    def embedded(self, x: mx.array) -> mx.array:
        rows = self._embed_audio.soft(x[:: self.args.conf_reduction_factor])
        token = mx.array([self.args.padding - self.args.vocab_offset])
        padding = self._embed_audio.hard(token).astype(rows.dtype)
        missing = self.args.rows - len(rows)
        return mx.concatenate([rows, mx.broadcast_to(padding, (missing, rows.shape[1]))])


_PARTS = {
    "subsample_conv_projection.conv_0": "subsample_conv_projection.layer0",
    "subsample_conv_projection.conv_1": "subsample_conv_projection.layer1",
    "conformer": "layers",
    "ffw_layer_start": "feed_forward1",
    "ffw_layer_end": "feed_forward2",
    "attention.attn": "self_attn",
    "attention.attn.relative_position_embedding.pos_proj": "self_attn.relative_k_proj",
    **{
        f"attention.attn.{part}": f"self_attn.{part}.linear"
        for part in ("q_proj", "k_proj", "v_proj")
    },
    "attention.post": "self_attn.post.linear",
    "attention.pre_attn_norm": "norm_pre_attn",
    "attention.post_norm": "norm_post_attn",
    **{
        part: f"{part}.linear"
        for part in ("ffw_layer_1", "ffw_layer_2", "linear_start", "linear_end")
    },
}


def audio_name(name: str) -> str:
    """Translate a tensor's name to this package's. Names already translated are kept."""
    if ".layers." in name or ".layer0." in name or ".layer1." in name:
        return name
    return renamed(re.sub(r"(conformer\.\d+)\.norm\.", r"\1.norm_out.", name), _PARTS)
