"""Small models as their authors publish them, and the same as transformers converts them."""

from __future__ import annotations

from typing import Any

from tests.support.hybrid import CONFIG as HYBRID
from tests.support.tiled import CONFIGS as TILED

Config = dict[str, Any]


def _chat(converted: Config, **more: Any) -> Config:
    """Return OpenGVLab's configuration of a converted InternVL."""
    vision = dict(converted["vision_config"])
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        "model_type": "internvl_chat",
        "llm_config": converted["text_config"],
        "vision_config": {
            **{key: vision[key] for key in kept},
            "model_type": "intern_vit_6b",
            "image_size": vision["image_size"][0],
            "patch_size": vision["patch_size"][0],
            "qkv_bias": vision.get("attention_bias", False),
            "qk_normalization": vision.get("use_qk_norm", False),
            "norm_type": vision.get("norm_type", "layer_norm"),
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-6,
        },
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "select_layer": converted.get("vision_feature_layer", -1),
        **more,
    }


def _aligner(kind: str) -> Config:
    return {"cls": "MlpProjector", "params": {"depth": 2, "projector_type": kind}}


_ACTS = {"hidden_act": "gelu"}
_NAME = {"model_name": "siglip_large_patch16_384", "select_layer": -1, "select_feature": "same"}
_DEEPSEEK = TILED["deepseek_vl"] | {"vision_config": TILED["deepseek_vl"]["vision_config"] | _ACTS}
_SAM = HYBRID["high_res_vision_config"] | {"mlp_dim": 192, "window_size": 2}
_HYBRID = HYBRID | {
    "vision_config": HYBRID["vision_config"] | _ACTS,
    "high_res_vision_config": _SAM,
}

CONVERTED: dict[str, Config] = {
    "internvl_chat": TILED["internvl"],
    "internvl_chat-norms": TILED["internvl-norms"],
    "multi_modality": _DEEPSEEK,
    "multi_modality-hybrid": _HYBRID,
}
CONFIGS: dict[str, Config] = {
    "internvl_chat": _chat(CONVERTED["internvl_chat"]),
    "internvl_chat-norms": _chat(CONVERTED["internvl_chat-norms"]),
    "multi_modality": {
        "model_type": "multi_modality",
        "language_config": _DEEPSEEK["text_config"],
        "vision_config": {
            **_DEEPSEEK["vision_config"],
            "cls": "CLIPVisionTower",
            "model_type": "vision",
            "params": _NAME | {"image_size": _DEEPSEEK["vision_config"]["image_size"]},
        },
        "aligner_config": _aligner("mlp_gelu"),
    },
    "multi_modality-hybrid": {
        "model_type": "multi_modality",
        "language_config": _HYBRID["text_config"],
        "vision_config": {
            **_HYBRID["vision_config"],
            "cls": "HybridVisionTower",
            "model_type": "vision",
            "params": {
                "low_res_cfg": _NAME | {"image_size": _HYBRID["vision_config"]["image_size"]},
                "high_res_cfg": {
                    "model_name": "sam_b_downsample",
                    "image_size": _SAM["image_size"],
                    "patch_size": _SAM["patch_size"],
                    "window_size": 2,
                    "width": _SAM["hidden_size"],
                    "layers": _SAM["num_hidden_layers"],
                    "heads": _SAM["num_attention_heads"],
                    "global_attn_indexes": _SAM["global_attn_indexes"],
                    "prompt_embed_dim": _SAM["output_channels"],
                },
            },
        },
        "aligner_config": _aligner("low_high_hybrid_split_mlp_gelu"),
    },
}
"""Configurations by the `model_type` of the original, and a variant."""
