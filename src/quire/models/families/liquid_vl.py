"""LFM2-VL (arXiv:2511.23404, section 5): LFM2 and SigLIP 2's encoder (arXiv:2502.14786)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.core.values import require
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.description import Norm
from quire.models.families.common import Family
from quire.models.families.liquid import lfm2, lfm2_moe
from quire.models.families.qwen_vl import vision_language_model
from quire.models.families.siglip import SIGLIP_PARTS, siglip
from quire.models.layers import ACTIVATIONS
from quire.models.lfm_vision import LayersMerging
from quire.models.paddle_vision import PictureTower
from quire.models.projectors import LayersProjector
from quire.models.qwen_vision import QwenVision, Table
from quire.models.settings import Settings
from quire.models.vision_language import TextPositionsModel

_DECODERS = {"lfm2": lfm2, "lfm2_moe": lfm2_moe}
_TOWERS = ("siglip2_vision_model", "lfm2_vl")
"""What publishers and conversions call SigLIP 2's encoder."""


def lfm2_vl(s: Settings) -> LanguageModel:
    inner = s.nested("text_config")
    kind = inner.word("model_type", default="lfm2")
    require("text_config.model_type", kind, _DECODERS)
    tied = s.flag("tie_embedding", "tie_word_embeddings", default=True)
    text = _DECODERS[kind](inner.changed(tie_embedding=tied))
    assert isinstance(text, DecoderModel)
    s.only("vision_feature_layer", -1)
    vision = partial(_vision, _projector(s), s.integer("downsample_factor", default=2))
    return vision_language_model(
        s, text.description, vision, text.names, PictureTower, _PARTS, TextPositionsModel
    )


def _projector(s: Settings) -> LayersProjector:
    name = s.word("projector_hidden_act", default="gelu")
    require("projector_hidden_act", name, ACTIVATIONS)
    normed = s.flag("projector_use_layernorm", "projector_use_layer_norm", default=True)
    return LayersProjector(
        name,
        norm=Norm(1e-5, centred=True, bias=True) if normed else None,
        width=s.integer("projector_hidden_size", default=2560),
        bias=s.flag("projector_bias", default=True),
    )


def _vision(projector: LayersProjector, square: int, v: Settings, width: int) -> QwenVision:
    """Whole pictures, of any shape; the rows of a square are what its patches become together."""
    require("vision_config.model_type", v.word("model_type", default=_TOWERS[0]), _TOWERS)
    v = v.filled(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
    )
    usual = siglip(
        v.changed(spatial_merge_size=square),
        width,
        patch=16,
        merging=LayersMerging(projector),
        rotated=False,
    )
    side = int(v.integer("num_patches", default=256) ** 0.5)
    return replace(usual, table=Table(side, ends=False, averaged=True))


_PARTS = SIGLIP_PARTS | {
    "post_layernorm": "merger.post_layernorm",
    "merger.post_layernorm": "merger.post_layernorm",
    "merger.layer_norm": "merger.norm",
}
_TITLE = "LFM2-VL and LFM2.5-VL, text and images"

FAMILIES = (
    Family("lfm2_vl", _TITLE, lfm2_vl),
    Family("lfm2-vl", _TITLE, lfm2_vl),
)
