"""EXAONE 4.5 (arXiv:2604.08644): text, pictures and videos."""

from __future__ import annotations

from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.families.common import Family, text_of
from quire.models.families.lg import exaone4_described
from quire.models.families.qwen_vl import vision_2_5, vision_language_model
from quire.models.settings import Settings
from quire.models.vision.qwen import QwenVision
from quire.models.vision.vision_language import TextPositionsModel
from quire.models.weights.names import Names


def exaone4_5(s: Settings) -> LanguageModel:
    """Build EXAONE 4 with Qwen2.5-VL's encoder, with fewer KV heads; positions are those of
    text.
    """
    text = text_of(s)
    text.only("model_type", "exaone4", "exaone4_5_text")
    names = Names(unused=("mtp.",))
    return vision_language_model(
        s, exaone4_described(text), _vision, names=names, model=TextPositionsModel
    )


def _vision(v: Settings, width: int) -> QwenVision:
    kv_heads = v.integer("num_key_value_heads", default=8)
    return replace(vision_2_5(v, width), kv_heads=kv_heads, times=0)


FAMILIES = (Family("exaone4_5", "EXAONE 4.5, text, images and video", exaone4_5),)
