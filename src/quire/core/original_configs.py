"""Translates `config.json` of models that have keys of their own to those of most families.

Families that are older than the usual keys have other names for some of them. Models published
before transformers supported them have other objects: OpenGVLab's `internvl_chat` (InternVL 2 to
3.5), DeepSeek's `multi_modality` (DeepSeek-VL and the understanding part of Janus), Baidu's
`ernie4_5_moe_vl` (ERNIE 4.5 VL), Moonshot's `kimi_k25` and `kimi_vl`, and `deepseek_vl_v2`
(DeepSeek-OCR 1 and 2), which conversions call `deepseekocr` and `deepseekocr_2`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.core.folder import read_object
from quire.core.media import TOWER_COLOURS
from quire.core.values import Values

Config = dict[str, Any]


def read_config(folder: Path) -> Config:
    """Return a model folder's `config.json`; empty where there is none.

    Raises:
        ModelError: it cannot be read, or holds a value that is not supported.
    """
    return by_usual_keys(read_object(folder / "config.json"))


def by_usual_keys(config: Config) -> Config:
    """Return a configuration with the usual keys added; `model_type` stays.

    Raises:
        ModelError: a value is not supported.
    """
    config = _packing_of_all(config)
    keys = _KEYS.get(str(config.get("model_type")), {})
    config = config | {ours: config[theirs] for theirs, ours in keys.items() if theirs in config}
    change = _ORIGINAL.get(str(config.get("model_type")))
    if change is None or _has_transformers_keys(config):
        return config
    return config | change(Values(config))


_GPT2 = {
    "activation_function": "hidden_act",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
_KEYS: dict[str, dict[str, str]] = {
    "dbrx": {
        "d_model": "hidden_size",
        "max_seq_len": "max_position_embeddings",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
    },
    "exaone": {
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
        "num_layers": "num_hidden_layers",
    },
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "longcat_flash": {
        "expert_ffn_hidden_size": "moe_intermediate_size",
        "ffn_hidden_size": "intermediate_size",
        "moe_topk": "num_experts_per_tok",
        "num_layers": "num_hidden_layers",
    },
}
"""By `model_type`, keys that have another name in most families, and that name."""


def _packing_of_all(config: Config) -> Config:
    """Copy the text part's quantisation to the whole, if only the text part states it."""
    key, text = "quantization_config", config.get("text_config")
    if key in config or not isinstance(text, dict) or key not in text:
        return config
    return config | {key: text[key]}


def _has_transformers_keys(config: Config) -> bool:
    """Return whether the keys are transformers' already."""
    known = Values(config).nested("vision_config", needed=False).value("model_type")
    return isinstance(known, str) and known in TOWER_COLOURS


def _internvl_chat(config: Values) -> Config:
    config.neutral({"ps_version": "v2", "pad2square": False})
    vision = config.nested("vision_config")
    return {
        "text_config": config.nested("llm_config", "text_config").values,
        "vision_config": {
            **vision.values,
            "model_type": "internvl_vision",
            "image_size": config.value("force_image_size") or vision.value("image_size", 448),
            "attention_bias": vision.value("qkv_bias", default=True),
            "use_qk_norm": vision.value("qk_normalization", default=False),
            "use_mean_pooling": True,
        },
        "vision_feature_layer": config.value("select_layer", -1),
        "tie_word_embeddings": False,
    }


_SIGLIP = {
    "siglip_large_patch16_384": (1024, 4096, 24, 16, 384, 16),
    "siglip_so400m_patch14_384": (1152, 4304, 27, 16, 384, 14),
}
"""Values of `_SIZES` for each named encoder."""
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "image_size",
    "patch_size",
)


def _multi_modality(config: Values) -> Config:
    vision = config.nested("vision_config")
    params = vision.nested("params", needed=False)
    hybrid = params.has("high_res_cfg")
    text = config.nested("language_config", "text_config").values
    aligner = config.nested("aligner_config", "projector_config").nested("params")
    aligner.word("projector_type")
    kind = "low_high_hybrid_split_mlp_gelu" if hybrid else "mlp_gelu"
    aligner.neutral({"projector_type": kind, "depth": 2})
    small = params.nested("low_res_cfg") if hybrid else params
    made = {
        "text_config": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6} | text,
        "vision_config": _siglip(small, vision.values),
        "tie_word_embeddings": False,
    }
    if hybrid:
        made["high_res_vision_config"] = _sam(params.nested("high_res_cfg"))
    return made


def _siglip(params: Values, sizes: Config) -> Config:
    """Read the encoder's sizes. Conversions may state them beside its name."""
    params.neutral({"select_layer": -1, "select_feature": "same"})
    params.only("model_name", *_SIGLIP)
    name = params.word("model_name", default="siglip_large_patch16_384")
    known = dict(zip(_SIZES, _SIGLIP[name], strict=True))
    named = {"image_size": params.values["image_size"]} if params.has("image_size") else {}
    given = {key: sizes[key] for key in _SIZES if sizes.get(key) is not None}
    return {"model_type": "siglip_vision_model", "hidden_act": "gelu", **known, **given, **named}


def _sam(params: Values) -> Config:
    """Read SAM's sizes."""
    params.only("model_name", "sam_b_downsample")
    return {
        "hidden_size": params.value("width", 768),
        "num_hidden_layers": params.value("layers", 12),
        "num_attention_heads": params.value("heads", 12),
        "image_size": params.value("image_size", 1024),
        "patch_size": params.value("patch_size", 16),
        "window_size": params.value("window_size", 14),
        "global_attn_indexes": params.value("global_attn_indexes", [2, 5, 8, 11]),
        "output_channels": params.value("prompt_embed_dim", 256),
    }


CLIP, QUERIES = "clip_vision_model", "deepseek_ocr2_encoder"
"""Model types of the second encoder of DeepSeek-OCR 1 and 2."""
OCR_TILES = {CLIP: (5, 8), QUERIES: (3, 4)}
"""By the second encoder, the side of a tile as a share of a whole picture's: 640 and 768 of 1024
pixels in published code.
"""


def _deepseek_ocr(config: Values) -> Config:
    if config.nested("vision_config").has("sam_config"):
        return {}  # translated before
    config.neutral({"tile_tag": "2D", "global_view_pos": "head"})
    vision = config.nested("vision_config")
    if not isinstance(vision.value("width"), dict):
        raise vision.error("model_name", "which is not an encoder of DeepSeek-OCR 1 or 2")
    vision = vision.nested("width")
    known = vision.nested("clip-l-14-224", needed=False)
    clip = bool(known.values)
    found = known if clip else vision.nested("qwen2-0-5b")
    sam = vision.nested("sam_vit_b")
    # The second convolution's channels are the second encoder's width.
    channels = [512, known.integer("width", default=1024) if clip else found.integer("dim")]
    config.nested("projector_config").neutral({"projector_type": "linear"})
    text = config.nested("language_config", "text_config").values
    return {
        "text_config": {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, **text},
        "vision_config": {
            "sam_config": _sam(sam) | {"downsample_channels": channels},
            "encoder_config": _clip(known) if clip else _queries(found),
        },
        "image_token_id": config.value("image_token_index", 128_815),
        "tie_word_embeddings": False,
    }


def _clip(params: Values) -> Config:
    width = params.integer("width", default=1024)
    return {
        "model_type": CLIP,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": params.value("layers", 24),
        "num_attention_heads": params.value("heads", 16),
        "image_size": params.value("image_size", 224),
        "patch_size": params.value("patch_size", 14),
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    }


def _queries(params: Values) -> Config:
    return {
        "model_type": QUERIES,
        "hidden_size": params.integer("dim", default=896),
        "intermediate_size": params.value("intermediate_size", 4864),
        "num_hidden_layers": params.value("layers", 24),
        "num_attention_heads": params.value("heads", 14),
        "num_key_value_heads": params.value("kv_heads", 2),
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    }


def _ernie(config: Values) -> Config:
    token = config.value("image_token_id", config.value("im_patch_id", 100_295))
    return {"image_token_id": token}


_KIMI = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
}
"""The encoder configuration of Kimi K2.5 and Kimi-VL."""


def _kimi_k25(config: Values) -> Config:
    made: Config = {}
    if config.has("media_placeholder_token_id"):
        made["image_token_id"] = config.value("media_placeholder_token_id")
    if config.has("vision_config"):
        vision = config.nested("vision_config", needed=False)
        vision.neutral(
            {
                "pos_emb_type": "divided_fixed",
                "merge_type": "sd2_tpool",
                "mm_projector_type": "patchmerger",
                "projector_hidden_act": "gelu",
            }
        )
        given = {ours: vision.value(key) for key, ours in _KIMI.items() if vision.has(key)}
        made["vision_config"] = {**vision.values, **given}
        if vision.has("projector_ln_eps"):
            made["projection_layer_norm_eps"] = vision.value("projector_ln_eps")
    return made


_ORIGINAL: dict[str, Callable[[Values], Config]] = {
    **dict.fromkeys(("deepseek_vl_v2", "deepseekocr", "deepseekocr_2"), _deepseek_ocr),
    "ernie4_5_moe_vl": _ernie,
    "internvl_chat": _internvl_chat,
    "kimi_k25": _kimi_k25,
    "kimi_vl": _kimi_k25,
    "multi_modality": _multi_modality,
}
