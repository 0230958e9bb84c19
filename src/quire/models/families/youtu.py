"""Youtu-LLM (arXiv:2512.24618), with DeepSeek's latent attention, dense; Youtu-VL
(arXiv:2601.19798).
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.description import Description, Norm
from quire.models.families.common import Family, described, mlp, uniform_layers
from quire.models.families.deepseek import latent_attention
from quire.models.families.qwen_vl import vision_language_model
from quire.models.families.siglip import SIGLIP_PARTS, UNREAD, siglip
from quire.models.settings import Settings
from quire.models.vision.paddle import PaddleMerging, PictureTower
from quire.models.vision.qwen import QwenVision
from quire.models.vision.vision_language import TextPositionsModel
from quire.models.weights.names import Names


def youtu(s: Settings) -> LanguageModel:
    return DecoderModel(*_text(s))


def youtu_vl(s: Settings) -> LanguageModel:
    """Build Youtu-VL. The decoder's keys are beside `vision_config`."""
    text = s.within("text_config").filled(rope_theta=5e5)
    description, names = _text(text)
    return vision_language_model(
        s,
        description,
        _vision,
        names=names,
        tower=PictureTower,
        parts=_PARTS,
        model=TextPositionsModel,
    )


def _text(s: Settings) -> tuple[Description, Names]:
    kind = latent_attention(s)
    return described(s, uniform_layers(s, kind, mlp(s)), tied=True), Names(prepare=kind.absorbed)


def _vision(v: Settings, width: int) -> QwenVision:
    """Describe SigLIP's encoder with Qwen2.5-VL's windows, and rotation instead of a table of
    positions.
    """
    v = v.filled(window_size=256, fullatt_block_indexes=[7, 15, 23, 26])
    usual = siglip(v, width, patch=16, merging=PaddleMerging(Norm(1e-6)))
    window = v.integer("window_size") // usual.patch // usual.merge
    return replace(usual, window=window, whole=v.integers("fullatt_block_indexes"))


_PARTS = SIGLIP_PARTS | {
    "embeddings.position_embedding": UNREAD,
    "post_layernorm": "merger.post_layernorm",
    "merger.post_layernorm": "merger.post_layernorm",
    "merger.ln_q": "merger.norm",
    "merger.mlp.0": "merger.linear_fc1",
    "merger.mlp.2": "merger.linear_fc2",
}

FAMILIES = (
    Family("youtu", "Youtu-LLM", youtu),
    Family("youtu_llm", "Youtu-LLM", youtu),
    Family("youtu_vl", "Youtu-VL, text and images", youtu_vl),
)
