"""HunyuanOCR (arXiv:2511.19575): Hunyuan's dense decoder with a vision encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelError
from quire.core.media import CLIP_COLOURS, PlacedMedia
from quire.models.base import LanguageModel, MediaEncoder
from quire.models.decoder import DecoderModel
from quire.models.description import Norm
from quire.models.families.common import (
    Family,
    activation,
    described,
    mlp,
    rms,
    text_of,
    uniform_layers,
)
from quire.models.families.qwen import with_axes
from quire.models.families.qwen_vl import joined
from quire.models.families.tencent import NAMES, hunyuan_attention
from quire.models.layers.feed_forward import MLP
from quire.models.settings import Settings
from quire.models.vision.hunyuan import (
    HunyuanMerging,
    HunyuanPictureEncoder,
    HunyuanTower,
    placed_by_picture,
)
from quire.models.vision.place_table import Table
from quire.models.vision.qwen import QwenVision
from quire.models.vision.vision_language import VisionLanguageModel
from quire.models.weights.names import Weights, renamed


def hunyuan_vl(s: Settings) -> LanguageModel:
    text = _text(s)
    section = text.values["rope_parameters"]["mrope_section"]
    layers = uniform_layers(text, hunyuan_attention(text), mlp(text, bias=False))
    decoder = DecoderModel(described(text, layers, norm=rms(text, 1e-5)), NAMES)
    if not s.has("vision_config"):
        return decoder
    kind = _vision(s.within("vision_config"), decoder.description.hidden_size)
    return HunyuanVL(decoder, HunyuanTower(kind), len(section))


def _text(s: Settings) -> Settings:
    """Return the text part's settings, which early files have beside the encoder's."""
    text = text_of(s.filled(tie_word_embeddings=True))
    if text.has("attention_head_dim"):
        text = text.filled(head_dim=text.integer("attention_head_dim"))
    given = text.scaling()
    section = given.integers("xdrope_section") or given.integers("mrope_section")
    if len(section) < 3:
        raise ModelError(f"config.json: xdrope_section = {section!r} is not of three axes or more")
    rope = {key: value for key, value in given.values.items() if key != "xdrope_section"}
    if text.rope_type() == "xdrope":
        rope |= {"rope_type": "dynamic", "type": "dynamic"}
    rope["mrope_section"] = section
    text = text.changed(rope_parameters=rope, rope_scaling=None)
    return with_axes(text, (0, 0, 0), interleaved=False)


def _vision(v: Settings, width: int) -> QwenVision:
    patch = v.integer("patch_size", default=16)
    v.only("interpolate_mode", "bilinear")
    eps = v.number("rms_norm_eps", "layer_norm_eps", default=1e-5, minimum=0.0)
    name = activation(v, "gelu")
    return QwenVision(
        depth=v.integer("num_hidden_layers"),
        hidden_size=v.integer("hidden_size"),
        heads=v.integer("num_attention_heads"),
        mlp=MLP(v.integer("intermediate_size"), name, gated=False, bias=True),
        norm=Norm(eps, centred=True, bias=True),
        output_size=width,
        patch=patch,
        frames=1,
        merge=v.integer("spatial_merge_size", default=2),
        colours=CLIP_COLOURS,
        merging=HunyuanMerging(Norm(eps), name),
        patch_bias=True,
        rotated=False,
        table=Table(v.integer("max_image_size", default=2048) // patch, ends=False),
    )


class HunyuanVL(VisionLanguageModel):
    """The decoder with its encoder.

    Args:
        axes: number of position axes.
    """

    def __init__(self, text: DecoderModel, visual: HunyuanTower, axes: int) -> None:
        super().__init__(text.description, text.names, visual, visual_names=_visual_names)
        self._axes = axes

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        return {} if self.visual is None else {"image": HunyuanPictureEncoder(self.visual)}

    @property
    def position_axes(self) -> int:
        return self._axes

    def positions(
        self, tokens: Sequence[int], media: Sequence[PlacedMedia]
    ) -> npt.NDArray[np.float32] | None:
        if self.visual is None or not media:
            return None
        return placed_by_picture(len(tokens), media, self.visual.kind.merge, axes=self._axes)


_PARTS = {
    "embeddings.patch_embedding": "patch_embed.proj",
    "embeddings.position_embedding": "pos_embed",
    "layers": "blocks",
    "input_layernorm": "norm1",
    "layer_norm1": "norm1",
    "post_attention_layernorm": "norm2",
    "layer_norm2": "norm2",
    "self_attn": "attn",
    "o_proj": "proj",
    "dense_h_to_4h": "up_proj",
    "dense_4h_to_h": "down_proj",
    "fc1": "up_proj",
    "fc2": "down_proj",
    "perceive": "merger",
    "patch_merger": "merger",
    "before_rms": "norm",
    "proj.0": "proj_conv",
    "proj.2": "proj_out",
}
_KERNELS = ("patch_embed.proj.weight", "merger.proj_conv.weight", "merger.proj_out.weight")


def _visual_names(weights: Weights) -> Weights:
    """Rename the encoder's tensors. Some matrices are published as convolutions."""
    ready: Weights = {}
    for name, array in weights.items():
        ours = renamed(name, _PARTS)
        if ours.endswith("position_ids") or ours == "merger.image_sep":
            continue
        if ours in _KERNELS and array.ndim == 4:
            # The input channels are the second axis; in conversions they are the last.
            first = array.shape[2] == array.shape[3]
            array = (array.moveaxis(1, -1) if first else array).flatten(1)
        elif ours == "pos_embed.weight" and array.shape[0] % 2:
            array = array[1:]  # the first is a class token's, which there is none of
        ready[ours] = array
    return joined(ready)


FAMILIES = (Family("hunyuan_vl", "HunyuanOCR, text and images", hunyuan_vl),)
