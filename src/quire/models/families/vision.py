"""Families whose pictures are tiles: encoders by `vision_config`, tensor names, and decoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx

from quire.core.errors import ModelError
from quire.core.media import TOWER_COLOURS
from quire.core.values import require
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.description import Norm
from quire.models.families.cohere import cohere2
from quire.models.families.common import activation, text_of
from quire.models.families.ibm import granite
from quire.models.families.internlm import internlm2, internlm3
from quire.models.families.meta import llama
from quire.models.families.microsoft import phi3
from quire.models.families.mistral import mistral
from quire.models.families.openai import gpt_oss
from quire.models.families.qwen import qwen2, qwen3, qwen3_moe
from quire.models.layers.feed_forward import MLP
from quire.models.settings import Settings
from quire.models.vision.packing import InOrder, Packing
from quire.models.vision.projectors import Projector
from quire.models.vision.tiles import TILES, TiledModel
from quire.models.vision.vit import VisionTransformer
from quire.models.weights.names import Weights, renamed

SIGLIP, CLIP, INTERNVIT = "siglip_vision_model", "clip_vision_model", "internvl_vision"

_DECODERS: dict[str, Callable[[Settings], LanguageModel]] = {
    "cohere2": cohere2,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "internlm2": internlm2,
    "internlm3": internlm3,
    "llama": llama,
    "mistral": mistral,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}
"""Functions that build decoders, by the `model_type` of `text_config`."""
_SIZES = {
    "llama": (4096, 11008, 32, 32, 32),
    "mistral": (4096, 14336, 32, 32, 8),
    "qwen2": (4096, 22016, 32, 32, 32),
}
"""Transformers' defaults of sizes that configurations omit."""
_SIZE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def decoder_of(s: Settings, *known: str) -> LanguageModel:
    """Build the decoder of `text_config`, which must have one of these types; the first is the
    default.

    Raises:
        ModelError: it has another type.
    """
    text = text_of(s)
    kind = text.word("model_type", default=known[0])
    require("text_config.model_type", kind, known)
    if kind in _SIZES:
        usual = dict(zip(_SIZE_KEYS, _SIZES[kind], strict=True))
        text = text.changed(**{key: n for key, n in usual.items() if not text.has(key)})
    return _DECODERS[kind](text)


def vision_transformer(
    v: Settings, layers: tuple[int, ...], *, last_norm: bool
) -> VisionTransformer:
    """Describe the encoder of a `vision_config`.

    Args:
        layers: layers whose outputs are used, counted from the end if negative; see
            `VisionTransformer.taken`.
        last_norm: whether the output is normalised.

    Raises:
        ModelError: there is no such layer, or the encoder's type is unknown.
    """
    kind = v.word("model_type", default=SIGLIP)
    require("vision_config.model_type", kind, tuple(_DEFAULTS))
    v = v.filled(**_DEFAULTS[kind])
    v = v.changed(**{key: _side(v.values[key]) for key in ("image_size", "patch_size")})
    usual = VisionTransformer(
        depth=v.integer("num_hidden_layers"),
        taken=(),
        hidden_size=v.integer("hidden_size"),
        heads=v.integer("num_attention_heads"),
        mlp=MLP(v.integer("intermediate_size"), activation(v), gated=False, bias=True),
        norm=Norm(v.number("layer_norm_eps", minimum=0.0), centred=True, bias=True),
        image=v.integer("image_size"),
        patch=v.integer("patch_size"),
        colours=TOWER_COLOURS[kind],
        last_norm=last_norm,
    )
    if kind == CLIP:
        usual = replace(usual, class_token=True, patch_bias=False, first_norm=True)
    if kind == INTERNVIT:
        usual = _internvit(v, usual)
    return taking(usual, layers)


def _internvit(v: Settings, usual: VisionTransformer) -> VisionTransformer:
    """Return InternViT's encoder: it has either kind of norm, and scales blocks' outputs."""
    v.only("use_absolute_position_embeddings", True)
    kind = v.word("norm_type", default="layer_norm")
    require("norm_type", kind, ("layer_norm", "rms_norm"))
    return replace(
        usual,
        norm=usual.norm if kind == "layer_norm" else Norm(usual.norm.eps),
        class_token=True,
        attention_bias=v.flag("attention_bias", default=False),
        qk_norm=Norm(1e-6) if v.flag("use_qk_norm", default=False) else None,
        scaled=True,
    )


def _side(value: Any) -> Any:
    """Return a number that may be given twice, once for each side."""
    return value[0] if isinstance(value, list) and len(set(value)) == 1 else value


_DEFAULTS = {
    SIGLIP: {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    CLIP: {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    INTERNVIT: {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
    },
}


def taking(kind: VisionTransformer, layers: tuple[int, ...]) -> VisionTransformer:
    """Return the encoder with these layers' outputs, without layers after the last of them.

    Raises:
        ModelError: there is no such layer.
    """
    taken = tuple(layer if layer >= 0 else kind.depth + 1 + layer for layer in layers)
    for layer, place in zip(layers, taken, strict=True):
        if not 0 <= place <= kind.depth:
            raise ModelError(
                f"config.json: vision_feature_layer = {layer} of a vision encoder of {kind.depth} "
                "layers"
            )
    return replace(kind, taken=taken, depth=max(1, *taken))


def tiled_vision_model(
    text: LanguageModel,
    kind: VisionTransformer,
    projector: Projector,
    packings: dict[str, Packing] | None = None,
    prepare: Callable[[Weights], Weights] | None = None,
    multiplier: float = 1.0,
) -> LanguageModel:
    """Build the decoder with a vision transformer.

    Args:
        packings: packing of each media kind; None means pictures, with tiles in order.
        prepare, multiplier: see `TiledModel`.
    """
    assert isinstance(text, DecoderModel)
    names = partial(visual_names, kind)
    return TiledModel(
        text,
        kind,
        projector,
        packings=packings or {"image": InOrder()},
        visual_names=names,
        prepare=prepare,
        multiplier=multiplier,
    )


def without_vision(text: LanguageModel) -> LanguageModel:
    """Return the decoder alone, for a checkpoint that may hold an encoder's tensors."""
    assert isinstance(text, DecoderModel)
    names = text.names
    return DecoderModel(text.description, replace(names, unused=(*names.unused, *TILES)))


_TOWER = {
    # InternViT's
    "embeddings.cls_token": "embeddings.class_embedding",
    "embeddings.patch_embeddings.projection": "embeddings.patch_embedding",
    "embeddings.position_embeddings": "embeddings.position_embedding.weight",
    "encoder.layer": "layers",
    "attention": "self_attn",
    "projection_layer": "out_proj",
    "layernorm_before": "layer_norm1",
    "layernorm_after": "layer_norm2",
    "layernorm": "last_norm",
    "lambda_1": "scale1",
    "lambda_2": "scale2",
    # CLIP's and SigLIP's
    "encoder.layers": "layers",
    "pre_layrnorm": "first_norm",
    "post_layernorm": "last_norm",
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
}
_PROJECTOR = {
    "mm_soft_emb_norm": "norm",
    "layer_norm": "norm",
    "layernorm": "norm",
}


def visual_names(kind: VisionTransformer, weights: Weights) -> Weights:
    """Rename the encoder's tensors, and drop those that its output does not depend on."""
    ready: Weights = {}
    for name, array in weights.items():
        part, _, inner = name.removeprefix("visual.").partition(".")
        if part != "vision_tower":
            found = f"{part}.{renamed(inner, _PROJECTOR)}" if inner else part
            ready[found] = array
            continue
        inner = renamed(inner.removeprefix("vision_model."), _TOWER)
        if not _is_unused(kind, inner):
            ready[f"{part}.{inner}"] = _laid_out(inner, array)
    # Gemma 3's norm is stored less one, and its matrix transposed.
    norm, matrix = (f"multi_modal_projector.{each}" for each in ("norm.weight", _TRANSPOSED))
    if matrix in ready:
        ready[norm] = ready[norm] + 1.0
        ready["multi_modal_projector.linear.weight"] = ready.pop(matrix).T
    return ready


_PATCHES = "embeddings.patch_embedding.weight"
_TRANSPOSED = "mm_input_projection_weight"


def _is_unused(kind: VisionTransformer, name: str) -> bool:
    first, *rest = name.split(".")
    if first == "layers":
        return int(rest[0]) >= kind.depth
    ends = first == "last_norm" and not kind.last_norm
    return ends or first == "head" or name.endswith(("position_ids", "mask_token"))


def _laid_out(name: str, array: mx.array) -> mx.array:
    """Convert a tensor of the encoder to its module's layout.

    A convolution over patches becomes a matrix; colours are its second axis or its last.
    """
    if name == "embeddings.class_embedding":
        return array.flatten()
    if name == "embeddings.position_embedding.weight":
        return array.reshape(array.shape[-2:])
    if name != _PATCHES or array.ndim == 2:
        return array
    return (array if array.shape[-1] == 3 else array.moveaxis(1, -1)).flatten(1)
