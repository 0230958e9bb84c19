"""`config.json` of models published before transformers had them, by transformers' keys.

OpenGVLab's `internvl_chat` (InternVL 2 to 3.5), DeepSeek's `multi_modality` (DeepSeek-VL, and what
Janus understands), and Baidu's `ernie4_5_moe_vl` (ERNIE 4.5 VL).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.core.folder import read_object
from quire.core.media import TOWER_COLOURS

Config = dict[str, Any]


def read_config(folder: Path) -> Config:
    """A model folder's `config.json`; empty where there is none.

    Raises:
        ModelError: it cannot be read, or holds a value that is not supported.
    """
    return by_usual_keys(read_object(folder / "config.json"))


def by_usual_keys(config: Config) -> Config:
    """A configuration by transformers' keys, with its own besides; `model_type` stays.

    Raises:
        ModelError: a value is not supported.
    """
    change = _ORIGINAL.get(str(config.get("model_type")))
    if change is None or _has_transformers_keys(config):
        return config
    return config | change(config)


def _has_transformers_keys(config: Config) -> bool:
    """Whether the keys are transformers' already."""
    known = _object(config, "vision_config", default={}).get("model_type")
    return isinstance(known, str) and known in TOWER_COLOURS


def _internvl_chat(config: Config) -> Config:
    _only("ps_version", config.get("ps_version", "v2"), "v2")
    _only("pad2square", config.get("pad2square", False), False)
    vision = _object(config, "vision_config")
    return {
        "text_config": _object(config, "llm_config", "text_config"),
        "vision_config": {
            **vision,
            "model_type": "internvl_vision",
            "image_size": config.get("force_image_size") or vision.get("image_size", 448),
            "attention_bias": vision.get("qkv_bias", True),
            "use_qk_norm": vision.get("qk_normalization", False),
            "use_mean_pooling": True,
        },
        "vision_feature_layer": config.get("select_layer", -1),
        "tie_word_embeddings": False,
    }


_SIGLIP = {
    "siglip_large_patch16_384": (1024, 4096, 24, 16, 384, 16),
    "siglip_so400m_patch14_384": (1152, 4304, 27, 16, 384, 14),
}
"""By the name of an encoder, its `_SIZES`."""
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "image_size",
    "patch_size",
)


def _multi_modality(config: Config) -> Config:
    vision = _object(config, "vision_config")
    params = _object(vision, "params", default={})
    hybrid = "high_res_cfg" in params
    text = _object(config, "language_config", "text_config")
    aligner = _object(_object(config, "aligner_config", "projector_config"), "params")
    kind = "low_high_hybrid_split_mlp_gelu" if hybrid else "mlp_gelu"
    _only("aligner_config.params.projector_type", aligner.get("projector_type"), kind)
    _only("aligner_config.params.depth", aligner.get("depth", 2), 2)
    made = {
        "text_config": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6} | text,
        "vision_config": _siglip(_object(params, "low_res_cfg") if hybrid else params, vision),
        "tie_word_embeddings": False,
    }
    if hybrid:
        made["high_res_vision_config"] = _sam(_object(params, "high_res_cfg"))
    return made


def _siglip(params: Config, sizes: Config) -> Config:
    """Conversions may hold sizes beside the encoder's name."""
    _only("select_layer", params.get("select_layer", -1), -1)
    _only("select_feature", params.get("select_feature", "same"), "same")
    name = params.get("model_name", "siglip_large_patch16_384")
    _only("vision_config.params.model_name", name, *_SIGLIP)
    known = dict(zip(_SIZES, _SIGLIP[name], strict=True))
    named = {"image_size": params["image_size"]} if "image_size" in params else {}
    given = {key: sizes[key] for key in _SIZES if sizes.get(key) is not None}
    return {"model_type": "siglip_vision_model", "hidden_act": "gelu", **known, **given, **named}


def _sam(params: Config) -> Config:
    _only(
        "high_res_cfg.model_name", params.get("model_name", "sam_b_downsample"), "sam_b_downsample"
    )
    return {
        "hidden_size": params.get("width", 768),
        "num_hidden_layers": params.get("layers", 12),
        "num_attention_heads": params.get("heads", 12),
        "image_size": params.get("image_size", 1024),
        "patch_size": params.get("patch_size", 16),
        "window_size": params.get("window_size", 14),
        "global_attn_indexes": params.get("global_attn_indexes", [2, 5, 8, 11]),
        "output_channels": params.get("prompt_embed_dim", 256),
    }


def _ernie(config: Config) -> Config:
    return {"image_token_id": config.get("image_token_id", config.get("im_patch_id", 100_295))}


def _object(config: Config, *names: str, default: Config | None = None) -> Config:
    """What is under the first of these keys that is there and neither null nor empty.

    Raises:
        ModelError: it is no object, or there is none and no default.
    """
    for name in names:
        value = config.get(name)
        if not (value is None or value == {}):
            if not isinstance(value, dict):
                raise ModelError(f"config.json: {name} = {value!r} is not an object")
            return value
    if default is None:
        raise ModelError(f"config.json lacks {names[0]!r}")
    return default


def _only(name: str, value: Any, *known: Any) -> None:
    if value not in known:
        offered = ", ".join(map(repr, known))
        raise ModelError(f"config.json: {name} = {value!r} is not supported (known: {offered})")


_ORIGINAL: dict[str, Callable[[Config], Config]] = {
    "ernie4_5_moe_vl": _ernie,
    "internvl_chat": _internvl_chat,
    "multi_modality": _multi_modality,
}
