"""DeepSeek-OCR (arXiv:2510.18234) and DeepSeek-OCR 2 (arXiv:2601.20552), with small mixtures of
experts as decoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import mlx.core as mx

from quire.core.media import EVEN_COLOURS
from quire.core.original_configs import CLIP, OCR_TILES, QUERIES
from quire.core.values import require
from quire.models.base import LanguageModel, MediaEncoder
from quire.models.decoder import DecoderModel
from quire.models.families.common import Family, mlp, rms, text_of
from quire.models.families.deepseek import deepseek_v2
from quire.models.families.deepseek_vl import laid_out, sam
from quire.models.families.vision import vision_transformer
from quire.models.settings import Settings
from quire.models.vision.deepseek_ocr import (
    ClipReader,
    OcrEncoder,
    OcrTower,
    OcrVision,
    QueryReader,
    Reader,
)
from quire.models.weights.names import Weights, renamed


def deepseek_ocr(s: Settings) -> LanguageModel:
    text = deepseek_v2(text_of(s).filled(use_mla=False))
    assert isinstance(text, DecoderModel)
    if not s.has("vision_config"):
        return text
    v = s.within("vision_config")
    first, reader = v.within("sam_config"), v.within("encoder_config")
    name = reader.word("model_type", default=QUERIES)
    require("vision_config.encoder_config.model_type", name, tuple(OCR_TILES))
    large = replace(sam(first), colours=EVEN_COLOURS)
    channels = first.integers("downsample_channels") or (512, 896)
    require("vision_config.sam_config: downsample_channels", len(channels), (2,))
    part, of = OCR_TILES[name]
    visual = OcrVision(
        sam=large,
        channels=(channels[0], channels[1]),
        reader=_clip(reader) if name == CLIP else _queries(reader),
        tile=large.side * part // of,
        lines=name == CLIP,
        output_size=text.description.hidden_size,
    )
    return OcrModel(text, visual)


def _clip(v: Settings) -> Reader:
    return ClipReader(vision_transformer(v, (-1,), last_norm=False))


def _queries(v: Settings) -> Reader:
    heads = v.integer("num_attention_heads")
    v.only("use_sliding_window", False)
    return QueryReader(
        depth=v.integer("num_hidden_layers"),
        width=v.integer("hidden_size"),
        heads=heads,
        kv_heads=v.integer("num_key_value_heads", default=heads),
        mlp=mlp(v, bias=False),
        norm=rms(v),
        rope=v.rope(),
    )


_VISUAL = (
    "visual.",
    "sam_model.",
    "vision_model.",
    "qwen2_model.",
    "vision_tower.",
    "projector.",
    "multi_modal_projector.",
    "image_newline",
    "view_separator",
    "view_seperator",
)
"""Prefixes of the encoder's tensors: published, transformers' and mlx-vlm's."""
_PARTS = {
    # The first transformer
    "sam_model": "sam",
    "vision_tower.sam_encoder": "sam",
    "blocks": "layers",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "mlp.lin1": "mlp.up_proj",
    "mlp.lin2": "mlp.down_proj",
    "patch_embed.proj": "patch_embed",
    "patch_embed.projection": "patch_embed",
    "neck.0": "neck.conv1",
    "neck.1": "neck.layer_norm1",
    "neck.2": "neck.conv2",
    "neck.3": "neck.layer_norm2",
    "sam_model.net_2": "conv1",
    "sam_model.net_3": "conv2",
    "vision_tower.sam_encoder.proj": "",
    # The second
    "vision_model": "reader",
    "vision_model.qwen2_encoder": "reader",
    "qwen2_model": "reader",
    "qwen2_model.model.model": "reader",
    "vision_tower": "reader",
    "vision_tower.vision_encoder": "reader",
    "transformer.layers": "layers",
    "encoder.layers": "layers",
    "pre_layrnorm": "first_norm",
    "embeddings.class_embedding": "class_embedding",
    "embeddings.position_embedding": "position_embedding",
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
    "query_768": "tile_queries",
    "query_768_resolution": "tile_queries",
    "query_1024": "whole_queries",
    "query_1024_resolution": "whole_queries",
    # Behind both
    "projector.layers": "projector",
    "multi_modal_projector": "projector",
    "view_seperator": "view_separator",
}
"""Parts of names for `Names.renamed`."""
_UNREAD = ("embeddings.patch_embedding.weight", "position_ids")
"""Ends of names of tensors that nothing depends on: the map replaces CLIP's patches."""


class OcrModel(DecoderModel):
    """The decoder with the encoder; without its tensors, a model of text only."""

    def __init__(self, text: DecoderModel, kind: OcrVision) -> None:
        super().__init__(text.description, text.names)
        self.visual: OcrTower | None = OcrTower(kind)

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        return {} if self.visual is None else {"image": OcrEncoder(self.visual)}

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        text: Weights = {}
        visual: Weights = {}
        for name, array in weights.items():
            plain = name.removeprefix("model.")
            if not plain.startswith(_VISUAL):
                text[name] = array
            elif not plain.endswith(_UNREAD):
                visual |= _translated(plain.removeprefix("visual."), array)
        if not visual:
            self.visual = None
        return super().sanitize(text) | visual


def _translated(name: str, array: mx.array) -> Weights:
    """Return a tensor of the encoder by its name or names here, in its module's layout."""
    name = renamed(name, _PARTS).removeprefix(".")
    if name.endswith("_queries"):
        name += ".weight"
    array = laid_out(name, array)
    if ".qkv_proj." not in name:
        return {f"visual.{name}": array}
    parts = zip("qkv", mx.split(array, 3), strict=True)
    return {f"visual.{name.replace('qkv_proj', f'{part}_proj')}": rows for part, rows in parts}


_TITLE = "DeepSeek-OCR 1 and 2, text and images"
FAMILIES = (
    Family("deepseek_ocr2", "DeepSeek-OCR 2, text and images", deepseek_ocr),
    Family("deepseek_vl_v2", _TITLE, deepseek_ocr),
    Family("deepseekocr", "DeepSeek-OCR, text and images", deepseek_ocr),
    Family("deepseekocr_2", "DeepSeek-OCR 2, text and images", deepseek_ocr),
)
