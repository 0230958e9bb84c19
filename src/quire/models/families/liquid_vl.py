"""LFM2-VL (arXiv:2511.23404, section 5): LFM2 with SigLIP 2 (arXiv:2502.14786); and LFM3-VL."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.core.media import EVEN_COLOURS
from quire.core.values import require
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.description import Norm
from quire.models.families.common import Family, projector_activation
from quire.models.families.liquid import CONV, lfm2, lfm2_moe, lfm3
from quire.models.families.qwen_vl import vision_language_model
from quire.models.families.siglip import SIGLIP_PARTS, siglip
from quire.models.layers.feed_forward import MLP
from quire.models.settings import FULL, Settings
from quire.models.vision.lfm import LayersMerging, LfmTower
from quire.models.vision.paddle import PictureTower
from quire.models.vision.place_table import Table
from quire.models.vision.projectors import LayersProjector
from quire.models.vision.qwen import QwenVision
from quire.models.vision.vision_language import TextPositionsModel

_DECODERS = {"lfm2": lfm2, "lfm2_moe": lfm2_moe}
_TOWERS = ("siglip2_vision_model", "lfm2_vl")
"""Model types of SigLIP 2's encoder, in published and converted configurations."""


def lfm2_vl(s: Settings) -> LanguageModel:
    inner = s.nested("text_config")
    kind = inner.word("model_type", default="lfm2")
    require("text_config.model_type", kind, _DECODERS)
    tied = s.flag("tie_embedding", "tie_word_embeddings", default=True)
    text = _DECODERS[kind](inner.changed(tie_embedding=tied))
    assert isinstance(text, DecoderModel)
    s.only("vision_feature_layer", -1)
    normed = s.flag("projector_use_layernorm", "projector_use_layer_norm", default=True)
    square = s.integer("downsample_factor", default=2)
    vision = partial(_vision, _projector(s, normed=normed), square)
    return vision_language_model(
        s,
        text.description,
        vision,
        names=text.names,
        tower=PictureTower,
        parts=_PARTS,
        model=TextPositionsModel,
    )


def _projector(s: Settings, *, normed: bool) -> LayersProjector:
    """Return the projector; if `normed`, a norm precedes its first layer."""
    name = projector_activation(s)
    return LayersProjector(
        name,
        norm=Norm(1e-5, centred=True, bias=True) if normed else None,
        width=s.integer("projector_hidden_size", default=2560),
        bias=s.flag("projector_bias", default=True),
    )


def _vision(projector: LayersProjector, square: int, v: Settings, width: int) -> QwenVision:
    """Describe the encoder of pictures of any shape; each square of patches becomes one row."""
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


def lfm3_vl(s: Settings) -> LanguageModel:
    inner = s.nested("text_config")
    require("text_config.model_type", inner.word("model_type", default="lfm3"), ("lfm3",))
    tied = s.flag("tie_word_embeddings", default=True)
    text = lfm3(inner.changed(tie_word_embeddings=tied))
    assert isinstance(text, DecoderModel)
    if not s.has("vision_config"):
        return text
    v = s.within("vision_config").filled(rope_theta=1e6, num_hidden_layers=14)
    v.only("model_type", "lfm3_vl_vision", "lfm3_vl")
    usual = [CONV if n < 2 or n % 2 else FULL for n in range(v.integer("num_hidden_layers"))]
    types = v.layer_types(usual, (FULL, CONV))
    kernel = v.integer("conv_kernel_size", default=3)
    require("vision_config.conv_kernel_size % 2", kernel % 2, (1,))
    projector = _projector(s.filled(projector_hidden_size=4096), normed=False)
    return vision_language_model(
        s.changed(vision_config=v.values),
        text.description,
        partial(_vision_3, projector),
        names=text.names,
        tower=partial(
            LfmTower, frozenset(n for n, each in enumerate(types) if each == CONV), kernel
        ),
        parts=_PARTS_3,
        model=TextPositionsModel,
    )


def _vision_3(projector: LayersProjector, v: Settings, width: int) -> QwenVision:
    v.only("in_channels", 3)
    merging = LayersMerging(projector, Norm(1e-6, centred=True, bias=True))
    return QwenVision(
        depth=v.integer("num_hidden_layers"),
        hidden_size=v.integer("hidden_size", default=1024),
        heads=v.integer("num_attention_heads", default=16),
        kv_heads=v.integer("num_key_value_heads", default=8),
        mlp=MLP(v.integer("intermediate_size", default=2560), "silu"),
        norm=Norm(v.number("norm_eps", default=1e-5, minimum=0.0)),
        output_size=width,
        patch=v.integer("patch_size", default=16),
        frames=v.integer("temporal_patch_size", default=2),
        merge=v.integer("spatial_merge_size", default=2),
        colours=EVEN_COLOURS,
        merging=merging,
        patch_norm=True,
        planes=True,
        attention_bias=False,
        qk_norm=True,
    )


_PARTS_3 = {
    "patchifier": "patch_embed.proj",
    "embedding_norm": "patch_embed.norm",
    "layers": "blocks",
    "operator_norm": "norm1",
    "self_attn": "attn",
    "self_attn.out_proj": "attn.proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "conv": "attn",
    "conv.spatial_conv.weight": "attn.kernel",
    "ffn_norm": "norm2",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "merger.layer_norm": "merger.post_layernorm",
}
_PARTS = SIGLIP_PARTS | {
    "post_layernorm": "merger.post_layernorm",
    "merger.post_layernorm": "merger.post_layernorm",
    "merger.layer_norm": "merger.norm",
}
_TITLE = "LFM2-VL and LFM2.5-VL, text and images"

FAMILIES = (
    Family("lfm2_vl", _TITLE, lfm2_vl),
    Family("lfm2-vl", _TITLE, lfm2_vl),
    Family("lfm3_vl", "LFM3-VL, text, images and video", lfm3_vl),
)
