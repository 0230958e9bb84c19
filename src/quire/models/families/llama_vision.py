"""Llama 3.2 Vision (arXiv:2407.21783, section 7): the text decoder attends to pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn

from quire.core.errors import ModelError
from quire.core.media import CrossMedia, PlacedMedia
from quire.models.base import LanguageModel, MediaEncoder, Module
from quire.models.decoder import DecoderModel
from quire.models.description import Description, Layer, Norm, NormPlacement
from quire.models.families.common import Family, activation, attention, described, mlp, rms
from quire.models.layers.cross_attention import CrossAttention
from quire.models.layers.feed_forward import MLP
from quire.models.settings import Settings
from quire.models.vision.llama import LlamaPictureEncoder, LlamaVision, VisionTower
from quire.models.weights.names import Names, Weights, renamed

_MARKS = 8
"""Rows of the embedding table after the vocabulary's; the first is the picture's placeholder."""

_VISUAL = ("vision_model.", "vision_tower.", "multi_modal_projector.")
_PARTS = {"vision_tower": "vision_model", "fc1": "up_proj", "fc2": "down_proj"}


def mllama(s: Settings) -> LanguageModel:
    text = s.within("text_config").filled(rope_theta=5e5)
    if not text.has("tie_word_embeddings"):
        text = text.changed(tie_word_embeddings=False)
    text = text.filled(num_key_value_heads=8, rms_norm_eps=1e-5)
    usual = attention(text)
    crossing_layer = CrossAttention(usual.heads, usual.kv_heads, usual.head_dim, norm=rms(text))
    dense = mlp(text)
    crossing = text.integers("cross_attention_layers")
    layers = tuple(
        Layer((crossing_layer,), dense, NormPlacement.GATED)
        if index in crossing
        else Layer((usual,), dense)
        for index in range(text.integer("num_hidden_layers"))
    )
    decoder = described(text, layers, marks=_MARKS)
    return LlamaVisionModel(decoder, _vision(s.within("vision_config"), decoder.hidden_size))


def _vision(v: Settings, width: int) -> LlamaVision:
    patch, size = v.integer("patch_size", default=14), v.integer("image_size", default=448)
    if size % patch:
        raise ModelError(f"config.json: image_size = {size} is no multiple of {patch}")
    tiles = v.integer("max_num_tiles", default=4)
    # The default: all grids of at most the allowed number of tiles.
    usual = tuple((a, b) for a in range(1, tiles + 1) for b in range(1, tiles // a + 1))
    return LlamaVision(
        depth=v.integer("num_hidden_layers", default=32),
        gated_depth=v.integer("num_global_layers", default=8, minimum=0),
        levels=v.integers("intermediate_layers_indices") or (3, 7, 15, 23, 30),
        hidden_size=v.integer("hidden_size", default=1280),
        heads=v.integer("attention_heads", "num_attention_heads", default=16),
        mlp=MLP(
            v.integer("intermediate_size", default=5120),
            activation(v, "gelu"),
            gated=False,
            bias=True,
        ),
        norm=Norm(v.number("norm_eps", default=1e-5, minimum=0.0), centred=True, bias=True),
        output_size=width,
        side=size // patch,
        patch=patch,
        tiles=tiles,
        shapes=v.pairs("supported_aspect_ratios") or usual,
    )


class VisionTowerAndProjector(Module):
    """The encoder and its projector, as in checkpoints."""

    def __init__(self, kind: LlamaVision) -> None:
        super().__init__()
        levels = 1 + len(kind.levels)
        self.vision_model = VisionTower(kind)
        self.multi_modal_projector = nn.Linear(levels * kind.hidden_size, kind.output_size)


class LlamaVisionModel(DecoderModel):
    """A decoder whose tokens attend to the preceding picture, or to all pictures of a run.

    Tokens before any picture attend to none, as in Meta's own model.
    """

    def __init__(self, description: Description, kind: LlamaVision) -> None:
        super().__init__(description, Names())
        self.visual = VisionTowerAndProjector(kind)

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        visual = self.visual
        return {"image": LlamaPictureEncoder(visual.vision_model, visual.multi_modal_projector)}

    def cross_media(self, media: Sequence[PlacedMedia]) -> tuple[CrossMedia, ...]:
        keys = self.encoders["image"].cross_keys
        found = []
        for first, last in _neighbours(media):
            run = media[first:last]
            ends = accumulate(keys(each.item.shape) for each in run)
            seen = tuple((each.start, end) for each, end in zip(run, ends, strict=True))
            end = media[last].start if last < len(media) else None
            found.append(
                CrossMedia(run[0].start, end, tuple(each.item for each in run), visible=seen)
            )
        return tuple(found)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        text: Weights = {}
        visual: Weights = {}
        for name, array in weights.items():
            plain = name.removeprefix("model.").removeprefix("visual.")
            if not plain.startswith(_VISUAL):
                text[name] = array
            elif not plain.endswith("position_ids"):
                visual["visual." + renamed(plain, _PARTS)] = array
        name = "visual.vision_model.patch_embedding.weight"
        kernel = visual.get(name)
        if kernel is not None and kernel.ndim == 4:
            last = kernel.shape[-1] == 3  # a convolution; in conversions colours are last
            kernel = kernel if last else kernel.transpose(0, 2, 3, 1)
            visual[name] = kernel.reshape(len(kernel), -1)
        return super().sanitize(text) | visual


def _neighbours(media: Sequence[PlacedMedia]) -> list[tuple[int, int]]:
    """Return ranges `[first, last)` of items that are adjacent in the prompt."""
    cuts = [0] + [n for n in range(1, len(media)) if media[n].start != media[n - 1].end]
    return list(zip(cuts, [*cuts[1:], len(media)], strict=True)) if media else []


FAMILIES = (Family("mllama", "Llama 3.2 Vision, text and images", mllama),)
