"""Llama 4 with pictures (its model card): a vision transformer over tiles, rotated by place."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx

from quire.core.media import EVEN_COLOURS
from quire.models.base import LanguageModel
from quire.models.families.common import Family
from quire.models.families.meta import llama4_text
from quire.models.families.vision import CLIP, tiled_vision_model, vision_transformer
from quire.models.layers.rope import RopeParameters
from quire.models.settings import Settings
from quire.models.vision.projectors import AdapterProjector
from quire.models.vision.vit import VisionTransformer
from quire.models.weights.names import Weights, renamed


def llama4(s: Settings) -> LanguageModel:
    text = s.within("text_config")
    text.only("model_type", "llama4_text")
    decoder = llama4_text(text)
    if not s.has("vision_config"):
        return decoder
    v = s.within("vision_config").filled(**_SIZES)
    return tiled_vision_model(decoder, _tower(v), _projector(v), prepare=_by_usual_names)


_SIZES: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "projector_output_dim": 4096,
    "pixel_shuffle_ratio": 0.5,
}
"""Transformers' defaults."""


def _tower(v: Settings) -> VisionTransformer:
    """Describe the encoder: CLIP's with rotations. Its published code has fixed norms and GELUs."""
    v.only("model_type", "llama4_vision_model")
    v.only("hidden_act", "gelu")
    v.only("norm_eps", 1e-5)
    v.only("num_channels", 3)
    v.scaling().only("rope_type", "default")
    kind = vision_transformer(v.changed(model_type=CLIP), (-1,), last_norm=True)
    axial = RopeParameters(v.rope().rope_theta, rope_type="axial", interleaved=True)
    return replace(kind, colours=EVEN_COLOURS, rope=axial)


def _projector(v: Settings) -> AdapterProjector:
    v.only("multi_modal_projector_bias", False)
    ratio = v.number("pixel_shuffle_ratio", minimum=0.0)
    square = round(1 / ratio) if ratio else 0
    v.only("pixel_shuffle_ratio", 1 / max(square, 1))
    return AdapterProjector(square, v.integer("projector_output_dim"))


_PARTS = {
    "model.layers": "layers",
    "input_layernorm": "layer_norm1",
    "post_attention_layernorm": "layer_norm2",
    "o_proj": "out_proj",
    "layernorm_pre": "first_norm",
    "layernorm_post": "last_norm",
    "class_embedding": "embeddings.class_embedding",
    "patch_embedding.linear": "embeddings.patch_embedding",
    "positional_embedding_vlm": "embeddings.position_embedding.weight",
}
_PREFIXES = {
    "vision_model.vision_adapter.mlp.fc": "multi_modal_projector.linear_",
    "vision_model.": "vision_tower.",
    "multi_modal_projector.linear_1": "multi_modal_projector.linear_3",
}
"""Prefixes of the encoder's tensors, of which the first one that fits is replaced."""


def _by_usual_names(weights: Weights) -> Weights:
    """Rename tensors to the names of most families, and lay them out alike: the class token comes
    first, and a patch's matrix is a convolution.
    """
    ready: Weights = {}
    for name, array in weights.items():
        plain = name.removeprefix("model.")
        prefix = next((each for each in _PREFIXES if plain.startswith(each)), None)
        if prefix is None:
            ready[name] = array
            continue
        part = _PREFIXES[prefix] + renamed(plain.removeprefix(prefix), _PARTS)
        if part.endswith("position_embedding.weight"):
            array = mx.concatenate([array[-1:], array[:-1]])
        elif part.endswith("patch_embedding.weight"):
            side = math.isqrt(array.shape[1] // 3)
            array = array.reshape(-1, 3, side, side)
        ready[part] = array
    return ready


FAMILIES = (Family("llama4", "Llama 4, text and images", llama4),)
