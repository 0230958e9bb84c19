"""Gemma 4 12B ("unified"): the decoder reads raw patches and sound (Google's model card).

There are no encoders: norms and one linear layer project squares of pixels and pieces of a waveform
to the decoder's width. The decoder is `gemma4`'s, without experts and per-layer embeddings. Rows of
a picture see each other only in sliding layers and within the window, as in `gemma4` and in
Google's code. Transformers 5.23 has this mask for static caches; with other caches full layers see
whole pictures too, and sliding layers see beyond the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Self, cast

import mlx.core as mx
import mlx.nn as nn

from quire.core.errors import RequestError
from quire.models.arguments import read_arguments
from quire.models.base import MediaEncoder, Module
from quire.models.families.gemma4 import Gemma4
from quire.models.families.gemma4_arguments import Gemma4Arguments
from quire.models.layers.clipped import Projector
from quire.models.layers.norm import LayerNorm, RMSNorm
from quire.models.settings import Settings
from quire.models.vision.gemma4 import soft_tokens

_NEUTRAL = {"enable_moe_block": False, "hidden_size_per_layer_input": 0, "num_experts": 0}
"""Settings that this decoder does not support, with their only accepted values."""
_LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class PatchArguments:
    """The keys of `vision_config` that affect the computation, and the decoder's width.

    Attributes:
        patch_size: pixels along each side of a patch.
        pooling_kernel_size: patches along each side of the square that becomes a soft token.
        mm_posemb_size: the most squares along either side of an image.
    """

    text_hidden_size: int
    patch_size: int = 16
    pooling_kernel_size: int = 3
    mm_embed_dim: int = 3840
    mm_posemb_size: int = 1120
    rms_norm_eps: float = 1e-6

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PatchArguments | None:
        """Read a multimodal configuration; None if it has no vision part.

        Raises:
            ModelError: a value is not supported.
        """
        s = Settings(config)
        vision = s.nested("vision_config", needed=False)
        if not vision.values:
            return None
        width = s.within("text_config").integer("hidden_size")
        args = read_arguments(cls, vision.values, text_hidden_size=width)
        vision.only("output_proj_dims", args.mm_embed_dim)
        vision.only("model_patch_size", args.patch_size * args.pooling_kernel_size)
        return args

    @property
    def patch_values(self) -> int:
        """Number of values of a patch."""
        return 3 * self.patch_size**2


class PatchEmbedder(Module):
    """Projects squares of pixels to soft tokens, `embed_vision.` or `vision_embedder.` in
    checkpoints.
    """

    def __init__(self, args: PatchArguments) -> None:
        super().__init__()
        self.args = args
        values, width = args.patch_values * args.pooling_kernel_size**2, args.mm_embed_dim
        self.patch_ln1 = LayerNorm((values,), _LAYER_NORM_EPS, bias=True)
        self.patch_dense = nn.Linear(values, width)
        self.patch_ln2 = LayerNorm((width,), _LAYER_NORM_EPS, bias=True)
        self.pos_embedding = mx.zeros((args.mm_posemb_size, 2, width))
        self.pos_norm = LayerNorm((width,), _LAYER_NORM_EPS, bias=True)
        self.multimodal_embedder = Projector(width, args.text_hidden_size, args.rms_norm_eps)

    def __call__(self, patches: mx.array, rows: int, columns: int) -> mx.array:
        """uint8 `[rows * columns, patch_values]` -> `[tokens, text_hidden_size]`."""
        k, side = self.args.pooling_kernel_size, self.args.patch_size
        rows, columns = rows // k, columns // k
        grid = patches.reshape(rows, k, columns, k, side, side, 3).transpose(0, 2, 1, 4, 3, 5, 6)
        colours = grid.reshape(rows * columns, -1).astype(mx.float32) / 255
        dtype = self.pos_embedding.dtype  # the only tensor here that is never quantised
        x = self.patch_ln2(self.patch_dense(self.patch_ln1(colours.astype(dtype))))
        places = self.pos_embedding[None, :columns, 0] + self.pos_embedding[:rows, None, 1]
        return self.multimodal_embedder(self.pos_norm(x + places.reshape(x.shape)), dtype)


class PatchEncoder(MediaEncoder):
    """Embeds pictures and frames of videos. Its features are those of `Gemma4VisionEncoder`."""

    def __init__(self, embed_vision: PatchEmbedder) -> None:
        super().__init__()
        self.args = embed_vision.args
        self.embed_vision = embed_vision

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        return prod(shape) * self.args.patch_values

    def rows(self, shape: tuple[int, ...]) -> int:
        square = self.args.pooling_kernel_size
        return soft_tokens(shape, square, self.args.mm_posemb_size * square)

    def __call__(self, features: mx.array, shape: tuple[int, ...]) -> tuple[mx.array, ...]:
        rows, columns = shape
        return (self.embed_vision(features, rows, columns),)


@dataclass(frozen=True)
class WaveArguments:
    """The keys of `audio_config` that affect the computation.

    Attributes:
        samples: samples of one row.
    """

    samples: int
    rms_norm_eps: float

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WaveArguments | None:
        """Read a multimodal configuration; None if it has no audio part."""
        audio = Settings(config).nested("audio_config", needed=False)
        if not audio.values:
            return None
        samples = audio.integer("audio_embed_dim", default=640)
        for name in ("audio_samples_per_token", "hidden_size", "output_proj_dims"):
            audio.only(name, samples)
        return cls(samples, audio.number("rms_norm_eps", default=1e-6, minimum=0.0))


class WaveEncoder(MediaEncoder):
    """Embeds pieces of a waveform, each as one row.

    Args:
        norm: the decoder's norm, whose weight has the activations' type.
    """

    def __init__(self, embed_audio: Projector, samples: int, norm: RMSNorm) -> None:
        super().__init__()
        self.embed_audio = embed_audio
        self._samples = samples
        self._norm = norm

    @property
    def example_shape(self) -> tuple[int, ...]:
        return 100, self._samples

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        return prod(shape) * 4

    def rows(self, shape: tuple[int, ...]) -> int:
        frames, samples = shape
        if not frames or samples != self._samples:
            raise RequestError(
                f"A sound of {frames} frames of {samples} samples: the model takes "
                f"{self._samples} samples."
            )
        return frames

    def __call__(self, features: mx.array, shape: tuple[int, ...]) -> tuple[mx.array, ...]:
        waves = features.view(mx.float32).reshape(shape)
        return (self.embed_audio(waves, self._norm.weight.dtype),)


class Gemma4Unified(Gemma4):
    """The text decoder with its head, and the embedders of the checkpoint."""

    def __init__(
        self,
        args: Gemma4Arguments,
        vision: PatchArguments | None = None,
        audio: WaveArguments | None = None,
    ) -> None:
        super().__init__(args)
        self._samples = 0 if audio is None else audio.samples
        if vision is not None:
            self.embed_vision = cast("Any", PatchEmbedder(vision))
        if audio is not None:
            self.embed_audio = Projector(audio.samples, args.hidden_size, audio.rms_norm_eps)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        text = Settings(config).within("text_config")
        text.neutral(_NEUTRAL)
        filled = text.filled(sliding_window=1024, hidden_size_per_layer_input=0).values
        if "use_bidirectional_attention" not in text.values:  # a null turns it off
            filled["use_bidirectional_attention"] = "vision"
        return cls(
            Gemma4Arguments.from_config(filled),
            PatchArguments.from_config(config),
            WaveArguments.from_config(config),
        )

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        found: dict[str, MediaEncoder] = {}
        if self.embed_vision is not None:
            vision = PatchEncoder(cast("Any", self.embed_vision))
            found |= {"image": vision, "video": vision}  # a video's items are its frames
        if self.embed_audio is not None:
            found["audio"] = WaveEncoder(self.embed_audio, self._samples, self.model.norm)
        return found

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return super().sanitize({_renamed(name): array for name, array in weights.items()})


def _renamed(name: str) -> str:
    """Return transformers' name of a tensor; published files have the projector beside the
    embedder.
    """
    inner = "embed_vision.multimodal_embedder.embedding_projection."
    return name.replace("embed_vision.embedding_projection.", inner).replace(
        "vision_embedder.", "embed_vision."
    )
