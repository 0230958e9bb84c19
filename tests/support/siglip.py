"""Small configurations of families whose pictures have any shape and no places of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.core.media import MediaItem
from tests.support.seeing import BEGIN, END, PATCH, Prompt, picture, prompt
from tests.support.tiny_models import IMAGE, VIDEO, qwen3_5_config

_TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_TOWER = {
    "model_type": "siglip2_vision_model",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}

_LFM2: dict[str, Any] = {
    key: value for key, value in _TEXT.items() if key not in ("rms_norm_eps", "hidden_act")
} | {
    "model_type": "lfm2",
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
_LFM2_VL: dict[str, Any] = {
    "model_type": "lfm2_vl",
    "image_token_id": IMAGE,
    "projector_hidden_size": 96,
    "text_config": _LFM2,
    "vision_config": _TOWER | {"patch_size": PATCH, "num_patches": 25, "vision_use_head": False},
}

_UNWINDOWED = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": None}
_PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "patch_size": PATCH,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "lfm3_vl": {
        "model_type": "lfm3_vl",
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": BEGIN,
        "vision_end_token_id": END,
        "projector_hidden_size": 96,
        "text_config": _LFM2
        | {
            "model_type": "lfm3",
            "layer_types": ["conv", "sliding_attention", "full_attention"],
            "sliding_window": 32,
            "head_dim": 16,
        },
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "patch_size": PATCH,
        },
    },
    "lfm2_vl": _LFM2_VL,
    "lfm2_vl-experts": _LFM2_VL
    | {
        "projector_use_layernorm": False,
        "projector_bias": False,
        "text_config": _LFM2
        | {
            "model_type": "lfm2_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
    },
    "lighton_ocr": {
        "model_type": "lighton_ocr",
        "image_token_id": IMAGE,
        "spatial_merge_size": 2,
        "text_config": _TEXT | _UNWINDOWED | {"model_type": "qwen3"},
        "vision_config": _PIXTRAL,
    },
    "llava-pixtral": {
        "model_type": "llava",
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": False,
        "text_config": _TEXT | _UNWINDOWED | {"model_type": "mistral"},
        "vision_config": _PIXTRAL | {"patch_size": 2 * PATCH},
    },
    "mistral3": {
        "model_type": "mistral3",
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
        "tie_word_embeddings": False,
        "text_config": _TEXT | _UNWINDOWED | {"model_type": "mistral"},
        "vision_config": _PIXTRAL,
    },
    "youtu_vl": _TEXT
    | {
        "model_type": "youtu_vl",
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "tie_word_embeddings": True,
        "image_token_id": IMAGE,
        "vision_config": _TOWER
        | {
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "out_hidden_size": 64,
            "window_size": 16,  # pixels: windows of 2 by 2 squares
            "fullatt_block_indexes": [1],
        },
    },
    "phi4-siglip": _TEXT
    | {
        "model_type": "phi4-siglip",
        "num_key_value_heads": 2,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "pad_token_id": IMAGE,
        "mm_hidden_size": 64,
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_tower": "google/siglip2-so400m-patch16-naflex",
        "vision_config": _TOWER | {"patch_size": 2 * PATCH, "num_patches": 9},
    },
}
CONFIGS["kimi_k25"] = {
    "model_type": "kimi_k25",
    "image_token_id": IMAGE,
    "projection_hidden_size": 64,
    "tie_word_embeddings": False,
    "text_config": _TEXT
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "patch_size": PATCH,
        "pos_emb_height": 6,
        "pos_emb_width": 6,
    },
}
CONFIGS["kimi_vl"] = {
    "model_type": "kimi_vl",
    "media_placeholder_token_id": IMAGE,
    "tie_word_embeddings": False,
    "text_config": CONFIGS["kimi_k25"]["text_config"],
    "vision_config": {
        "model_type": "moonvit",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "patch_size": PATCH,
        "merge_kernel_size": [2, 2],
        "init_pos_emb_height": 6,
        "init_pos_emb_width": 6,
    },
}
CONFIGS["dots_ocr"] = _TEXT | {
    "model_type": "dots_ocr",
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "attention_bias": True,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_config": {
        "embed_dim": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "post_norm": True,
        "use_bias": False,
        "rms_norm_eps": 1e-5,
    },
}
_MINICPM: dict[str, Any] = {
    "model_type": "minicpmv4_6",
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "insert_layer_id": 1,
    "text_config": qwen3_5_config(),
    "vision_config": {key: value for key, value in _TOWER.items() if key != "model_type"}
    | {"image_size": 10, "patch_size": PATCH // 2},
}
CONFIGS["minicpmv4_6"] = _MINICPM
CONFIGS["minicpmv4_6-4x"] = _MINICPM | {
    "downsample_mode": "4x",
    "vision_config": _MINICPM["vision_config"] | {"image_size": 5 * PATCH, "patch_size": PATCH},
}
EVERY_PATCH = ("phi4-siglip", "llava-pixtral")
"""Families in which each patch is a row. Theirs are twice as large on each side."""


def shown(name: str, seed: int, rows: int, columns: int) -> MediaItem:
    """Return a picture for a family, of random colours."""
    item = picture(seed, rows, columns)
    if name in ("mistral3", "llava-pixtral"):  # each line has an end
        item = replace(item, tokens=item.tokens + rows // 2)
    if name == "minicpmv4_6":  # patches are merged twice, so they are half as large
        return replace(item, shape=(2 * rows, 2 * columns))
    return replace(item, shape=(rows // 2, columns // 2)) if name in EVERY_PATCH else item


def cases(name: str) -> dict[str, Prompt]:
    """Return prompts for a family."""
    return {
        "two of different sizes": prompt(3, shown(name, 2, 4, 4), shown(name, 3, 10, 6), 8),
        "text alone": prompt(40),
        "a picture": prompt(shown(name, 1, 6, 10), 5),
        "between texts": prompt(20, shown(name, 4, 2, 12), 20),
        "after long text": prompt(150, shown(name, 5, 8, 8), 4),
        "in a second turn": prompt(9, shown(name, 6, 6, 6), 30, shown(name, 7, 14, 4), 7),
    }
