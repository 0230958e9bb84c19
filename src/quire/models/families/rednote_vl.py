"""dots.ocr (arXiv:2512.02498): Qwen2 with an encoder like Qwen2.5-VL's, without windows."""

from __future__ import annotations

from quire.core.media import CLIP_COLOURS
from quire.models.base import LanguageModel
from quire.models.description import Norm
from quire.models.families.common import Family, described, rms, text_of
from quire.models.families.qwen import qwen2_layers
from quire.models.families.qwen_vl import vision_language_model
from quire.models.layers.feed_forward import MLP
from quire.models.settings import Settings
from quire.models.vision.paddle import PaddleMerging, PictureTower
from quire.models.vision.qwen import QwenVision
from quire.models.vision.vision_language import TextPositionsModel
from quire.models.weights.names import Names


def dots_ocr(s: Settings) -> LanguageModel:
    """Build the model. The decoder's keys are beside `vision_config`."""
    text = text_of(s).filled(rope_theta=1e6)
    text.only("attention_bias", True)
    return vision_language_model(
        s,
        described(text, qwen2_layers(text)),
        _vision,
        names=Names(renamed={"model.lm_head": "lm_head"}),
        tower=PictureTower,
        parts=_PARTS,
        model=TextPositionsModel,
    )


def _vision(v: Settings, width: int) -> QwenVision:
    """Describe the encoder, whose `hidden_size` is the decoder's."""
    v.neutral({"post_norm": True, "is_causal": False, "temporal_patch_size": 1})
    bias = v.flag("use_bias", default=False)
    inner = v.integer("intermediate_size", default=4224)
    return QwenVision(
        depth=v.integer("num_hidden_layers", default=42),
        hidden_size=v.integer("embed_dim", default=1536),
        heads=v.integer("num_attention_heads", default=12),
        mlp=MLP(inner, "silu", bias=bias),
        norm=rms(v, default=1e-5),
        output_size=width,
        patch=v.integer("patch_size", default=14),
        frames=1,
        merge=v.integer("spatial_merge_size", default=2),
        colours=CLIP_COLOURS,
        merging=PaddleMerging(Norm(1e-6, centred=True, bias=True)),
        patch_bias=True,
        patch_norm=True,
        attention_bias=bias,
    )


_PARTS = {
    "patch_embed.patchifier": "patch_embed",
    "mlp.fc1": "mlp.gate_proj",
    "mlp.fc2": "mlp.down_proj",
    "mlp.fc3": "mlp.up_proj",
    "post_trunk_norm": "merger.post_layernorm",
    "merger.ln_q": "merger.norm",
    "merger.mlp.0": "merger.linear_fc1",
    "merger.mlp.2": "merger.linear_fc2",
}
"""Parts of names for `Names.renamed`."""

FAMILIES = (Family("dots_ocr", "dots.ocr, text and images", dots_ocr),)
