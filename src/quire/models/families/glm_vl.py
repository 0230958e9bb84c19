"""GLM-4.1V to GLM-4.6V (arXiv:2507.01006) and GLM-OCR: text, pictures and videos."""

from __future__ import annotations

from dataclasses import replace

from quire.core.media import CLIP_COLOURS
from quire.models.base import LanguageModel
from quire.models.families.common import Family, activation, rms, text_of
from quire.models.families.qwen import with_axes
from quire.models.families.qwen_vl import vision_language_model
from quire.models.families.zhipu import (
    glm4_described,
    glm4_moe_described,
    glm4_moe_names,
    glm4_names,
)
from quire.models.layers.feed_forward import MLP
from quire.models.settings import Settings
from quire.models.vision.glm import GlmMerging
from quire.models.vision.place_table import Table
from quire.models.vision.qwen import QwenVision


def glm4v(s: Settings) -> LanguageModel:
    text = with_axes(text_of(s), (8, 12, 12), interleaved=False).filled(rms_norm_eps=1e-5)
    return vision_language_model(
        s, glm4_described(text, partial=1.0), _vision, names=glm4_names(text)
    )


def glm_ocr(s: Settings) -> LanguageModel:
    text = with_axes(text_of(s), (16, 24, 24), interleaved=False)
    text = text.filled(attention_bias=False, num_nextn_predict_layers=1, rms_norm_eps=1e-5)
    return vision_language_model(
        s, glm4_described(text, partial=1.0), _vision_ocr, names=glm4_names(text)
    )


def glm4v_moe(s: Settings) -> LanguageModel:
    text = with_axes(text_of(s), (8, 12, 12), interleaved=False).filled(attention_bias=True)
    return vision_language_model(s, glm4_moe_described(text), _vision, names=glm4_moe_names(text))


def glm46v(s: Settings) -> LanguageModel:
    """Build either decoder of GLM-4.6V, by the `model_type` of `text_config`."""
    text = s.within("text_config")
    text.only("model_type", "glm4v_text", "glm4v_moe_text")
    return (glm4v_moe if text.values.get("model_type") == "glm4v_moe_text" else glm4v)(s)


def _vision(v: Settings, width: int) -> QwenVision:
    patch = v.integer("patch_size", default=14)
    return QwenVision(
        depth=v.integer("depth"),
        hidden_size=v.integer("hidden_size"),
        heads=v.integer("num_heads"),
        mlp=MLP(v.integer("out_hidden_size"), activation(v)),
        norm=rms(v, 1e-5),
        output_size=width,
        patch=patch,
        frames=v.integer("temporal_patch_size", default=2),
        merge=v.integer("spatial_merge_size", default=2),
        colours=CLIP_COLOURS,
        merging=GlmMerging(v.integer("intermediate_size"), activation(v)),
        patch_bias=True,
        patch_norm=True,
        attention_bias=v.flag("attention_bias", default=False),
        table=Table(v.integer("image_size", default=336) // patch, cubic=True, ends=False),
    )


def _vision_ocr(v: Settings, width: int) -> QwenVision:
    usual = _vision(v.filled(attention_bias=True), width)
    inner = v.integer("intermediate_size")
    return replace(
        usual,
        mlp=MLP(inner, activation(v), bias=usual.attention_bias),
        merging=GlmMerging(3 * width, activation(v)),
        patch_norm=False,
        qk_norm=True,
        table=None,
    )


FAMILIES = (
    Family("glm4v", "GLM-4.1V, text, images and video", glm4v),
    Family("glm46v", "GLM-4.6V, text, images and video", glm46v),
    Family("glm4v_moe", "GLM-4.5V, text, images and video", glm4v_moe),
    Family("glm_ocr", "GLM-OCR, text, images and video", glm_ocr),
)
