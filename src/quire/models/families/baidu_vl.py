"""PaddleOCR-VL (arXiv:2510.14528) and ERNIE 4.5 VL: text, pictures and videos."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from quire.core.errors import ModelError
from quire.core.media import CLIP_COLOURS
from quire.core.values import require
from quire.models.base import LanguageModel
from quire.models.description import Layer, Norm
from quire.models.families.common import (
    Family,
    activation,
    attention,
    described,
    mlp,
    rms,
    text_of,
    uniform_layers,
)
from quire.models.families.qwen import with_axes
from quire.models.families.qwen_vl import vision_language_model
from quire.models.families.siglip import SIGLIP_PARTS, siglip
from quire.models.layers.feed_forward import MLP
from quire.models.layers.moe import Mixture
from quire.models.layers.moe_by_token import MixtureByToken
from quire.models.layers.routers import SoftmaxRouter
from quire.models.settings import Settings
from quire.models.vision.ernie import PAIR, ErnieTower, SpatialMerging
from quire.models.vision.paddle import PaddleMerging, PictureTower
from quire.models.vision.place_table import Table
from quire.models.vision.qwen import QwenVision
from quire.models.weights.names import Names, Weights, renamed


def paddleocr_vl(s: Settings) -> LanguageModel:
    """Build PaddleOCR-VL: ERNIE 4.5's decoder with positions of three axes.

    Early files have the decoder's keys outside `text_config`.
    """
    text = text_of(s.filled(tie_word_embeddings=True)).filled(rope_theta=5e5, head_dim=128)
    text = with_axes(text, (16, 24, 24), interleaved=False)
    bias = text.flag("use_bias", default=False)
    usual = attention(text, qkv_bias=bias, out_bias=bias)
    layers = uniform_layers(text, usual, mlp(text, bias=bias))
    description = described(text, layers, tied=True, norm=rms(text, 1e-5))
    return vision_language_model(
        s, description, _vision, names=Names(), tower=PictureTower, parts=_PARTS
    )


def _vision(v: Settings, width: int) -> QwenVision:
    merging = PaddleMerging(Norm(1e-5, centred=True, bias=True))
    usual = siglip(v, width, patch=14, merging=merging)
    side = v.integer("image_size", default=384) // usual.patch
    return replace(usual, table=Table(side, ends=False))


_PARTS = SIGLIP_PARTS | {
    "post_layernorm": "merger.post_layernorm",
    "merger.post_layernorm": "merger.post_layernorm",
    "merger.pre_norm": "merger.norm",
    "merger.linear_1": "merger.linear_fc1",
    "merger.linear_2": "merger.linear_fc2",
}


def ernie4_5_vl_moe(s: Settings) -> LanguageModel:
    text = text_of(s.filled(tie_word_embeddings=True))
    norm = rms(text, 1e-5)
    layers = _by_modality(s, text)
    description = described(text, layers, tied=True, norm=norm)
    names = Names(
        renamed={
            "shared_experts": "shared_expert",
            "gate.moe_statics.e_score_correction_bias": "e_score_correction_bias",
        },
        unused=("mtp",),
        prepare=partial(_by_kind, _pair(text, "moe_num_experts", 64)[0]),
    )
    tower = partial(ErnieTower, norm)
    return vision_language_model(
        s, description, _ernie_vision, names=names, tower=tower, parts=_ERNIE_PARTS
    )


def _by_modality(s: Settings, text: Settings) -> tuple[Layer, ...]:
    """Return the layers: dense ones, then layers with experts. Token ids of media are in the outer
    configuration.
    """
    text.only("use_bias", False)
    text.only("moe_norm_min", 1e-12)
    theta = with_axes(text, (22, 22, 20), interleaved=False).rope(theta=5e5)
    rope = replace(theta, interleaved=True, mrope_time_last=True)
    usual = attention(text, rope=rope, qkv_bias=False, out_bias=False)
    experts, widths = _pair(text, "moe_num_experts", 64), _pair(text, "moe_intermediate_size", 0)
    k = text.integer("moe_k", default=6)
    for_text, for_media = (
        Mixture(
            count, width, activation(text), router=SoftmaxRouter(k, normalise=True, corrected=True)
        )
        for count, width in zip(experts, widths, strict=True)
    )
    shared = widths[0] * text.integer("moe_num_shared_experts", default=2, minimum=0)
    block = MixtureByToken(
        for_text,
        for_media,
        tokens=_media_tokens(s),
        shared=mlp(text, width=shared, bias=False) if shared else None,
    )
    sparse, dense = Layer((usual,), block, by_token=True), Layer((usual,), mlp(text, bias=False))
    return tuple(sparse if each else dense for each in _sparse(text))


def _media_tokens(s: Settings) -> tuple[int, ...]:
    """Return the ids of image and video tokens, and of the tokens around them."""
    picture = s.integer("image_token_id", default=100295)
    around = {
        "image_start_token_id": 101304,
        "image_end_token_id": 101305,
        "video_start_token_id": 101306,
        "video_end_token_id": 101307,
        "video_token_id": 103367,
    }
    return (picture, *(s.integer(name, default=usual) for name, usual in around.items()))


def _sparse(text: Settings) -> list[bool]:
    """Return, for each layer, whether it has experts."""
    count = text.integer("num_hidden_layers")
    types = text.names("mlp_layer_types")
    if types:
        return [kind == "sparse" for kind in types]
    first = _pair(text, "moe_layer_start_index", 1)
    last = _pair(text, "moe_layer_end_index", count - 1)
    require("moe_layer_interval", text.integer("moe_layer_interval", default=1), (1,))
    return [max(first) <= index <= min(last) for index in range(count)]


def _pair(s: Settings, name: str, default: int) -> tuple[int, int]:
    """Read a number for text and one for media; a single number applies to both."""
    value = s.values.get(name, default)
    if isinstance(value, list):
        values = s.integers(name)
        if len(values) != 2:
            raise ModelError(f"config.json: {name} = {value!r} is not of text and of media")
        return values[0], values[1]
    number = s.integer(name, default=default, minimum=0)
    return number, number


def _by_kind(experts: int, weights: Weights) -> Weights:
    """Separate experts, routers and their biases of text and of media."""
    ready: Weights = {}
    for name, array in weights.items():
        base, _, last = name.rpartition(".mlp.")
        if last in ("gate.weight", "gate.weight_1", "gate_1.weight"):
            kind = "text" if last == "gate.weight" else "vision"
            # Published with a column per expert, converted with a row per expert.
            array = array if array.shape[0] == experts else array.T
            ready[f"{base}.mlp.{kind}_moe.gate.weight"] = array
        elif last == "moe_statics.e_score_correction_bias":
            for kind, row in zip(("text", "vision"), array, strict=True):
                ready[f"{base}.mlp.{kind}_moe.e_score_correction_bias"] = row
        elif found := _NUMBERED.fullmatch(last):
            number = int(found[1])
            kind = "text" if number < experts else "vision"
            ready[f"{base}.mlp.{kind}_moe.experts.{number % experts}.{found[2]}"] = array
        else:
            ready[renamed(name, _CONVERTED)] = array
    return {
        name: array.flatten() if name.endswith("e_score_correction_bias") else array
        for name, array in ready.items()
    }


_NUMBERED = re.compile(r"experts\.(\d+)\.(.+)")
_CONVERTED = {
    "mlp.gate": "mlp.text_moe.gate",
    "mlp.gate_1": "mlp.vision_moe.gate",
    "mlp.switch_mlp": "mlp.text_moe.experts",
    "mlp.switch_mlp_1": "mlp.vision_moe.experts",
    "mlp.e_score_correction_bias": "mlp.text_moe.e_score_correction_bias",
    "mlp.e_score_correction_bias_1": "mlp.vision_moe.e_score_correction_bias",
}


def _ernie_vision(v: Settings, width: int) -> QwenVision:
    hidden = v.integer("hidden_size")
    inner = v.integer("intermediate_size", default=int(hidden * v.number("mlp_ratio", default=4)))
    v.only("temporal_merge_size", PAIR)
    return QwenVision(
        depth=v.integer("depth"),
        hidden_size=hidden,
        heads=v.integer("num_heads"),
        mlp=MLP(inner, activation(v, "quick_gelu"), gated=False, bias=True),
        norm=Norm(v.number("rms_norm_eps", default=1e-6, minimum=0.0), centred=True, bias=True),
        output_size=width,
        patch=v.integer("patch_size", default=14),
        frames=1,
        merge=v.integer("spatial_merge_size", default=2),
        colours=CLIP_COLOURS,
        merging=SpatialMerging(),
        planes=True,
        singles=PAIR,
    )


def _layers(at: str, here: str) -> dict[str, str]:
    """Return the names of two layers and a norm: as published, in transformers, and in
    conversions.
    """
    parts = {"linear_fc1": ("0", "fc1"), "linear_fc2": ("2", "fc2"), "ln": ("3", "ln")}
    return {
        f"resampler.{at}.{name}": f"{here}.{part}"
        for part, (number, word) in parts.items()
        for name in (number, word, f"layers.{number}")
    }


_ERNIE_PARTS = {
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
    "ln": "merger.norm",
    "merger.ln": "merger.ln",
    "temporal.ln": "temporal.ln",
    "resampler.mlp": "temporal.mlp",
    "resampler.after_norm": "temporal.after_norm",
    **_layers("spatial_linear", "merger"),
    **_layers("temporal_linear", "temporal"),
}

_ERNIE = "ERNIE 4.5 VL MoE, text, images and video"

FAMILIES = (
    Family("paddleocr_vl", "PaddleOCR-VL, text and images", paddleocr_vl),
    Family("ernie4_5_vl_moe", _ERNIE, ernie4_5_vl_moe),
    Family("ernie4_5_moe_vl", _ERNIE, ernie4_5_vl_moe),
)
