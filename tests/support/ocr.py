"""Small DeepSeek-OCR 1 and 2 as DeepSeek publishes them, and pictures for them."""

from __future__ import annotations

from typing import Any

from quire.core.media import MediaItem
from tests.support.photographs import random_patches
from tests.support.seeing import Prompt, prompt
from tests.support.tiny_models import IMAGE

PATCH = 2
SIDES = {"deepseek_vl_v2": (16, 10), "deepseek_vl_v2-queries": (64, 48)}
"""Patches on a side of a whole picture and of a tile. The second's numbers of queries are fixed."""

_TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "first_k_dense_replace": 1,
    "max_position_embeddings": 2048,
    "use_mla": False,
    "kv_lora_rank": None,
    "q_lora_rank": None,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "v_head_dim": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _sam(name: str) -> dict[str, Any]:
    return {
        "width": 32,
        "layers": 3,
        "heads": 2,
        "image_size": SIDES[name][0] * PATCH,
        "patch_size": PATCH,
        "window_size": 3 if name == "deepseek_vl_v2" else 14,
        "global_attn_indexes": [1],
        "prompt_embed_dim": 16,
    }


def _config(name: str, second: dict[str, Any], width: int) -> dict[str, Any]:
    return {
        "model_type": "deepseek_vl_v2",
        "language_config": _TEXT,
        "projector_config": {"input_dim": width, "n_embed": 64, "projector_type": "linear"},
        "vision_config": {
            "model_type": "vision",
            "image_size": SIDES[name][0] * PATCH,
            "width": {"sam_vit_b": _sam(name), **second},
        },
        "tile_tag": "2D",
        "global_view_pos": "head",
        "image_token_index": IMAGE,
    }


_CLIP = {"width": 48, "layers": 2, "heads": 3, "image_size": 4 * 14, "patch_size": 14}
_QUERIES = {"dim": 48, "layers": 2, "heads": 3, "kv_heads": 1, "intermediate_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_vl_v2": _config("deepseek_vl_v2", {"clip-l-14-224": _CLIP}, 96),
    "deepseek_vl_v2-queries": _config("deepseek_vl_v2-queries", {"qwen2-0-5b": _QUERIES}, 48),
}


def picture(name: str, seed: int, down: int, across: int) -> MediaItem:
    """Return a picture of random colours, of so many tiles and the whole."""
    whole, tile = SIDES[name]
    features = random_patches(seed, down * across * tile**2 + whole**2, PATCH)
    cells, most = -(-tile // 4), -(-whole // 4)
    lines = name == "deepseek_vl_v2"
    rows = down * cells * (across * cells + lines) + most * (most + lines) + 1
    return MediaItem.of("image", features, (down, across), rows, bidirectional=False)


def cases(name: str) -> dict[str, Prompt]:
    """Return prompts for a family."""
    return {
        "two of different sizes": prompt(3, picture(name, 2, 0, 0), picture(name, 3, 1, 2), 8),
        "text alone": prompt(40),
        "a picture": prompt(picture(name, 1, 2, 1), 5),
        "after long text": prompt(150, picture(name, 5, 3, 2), 4),
        "in a second turn": prompt(9, picture(name, 6, 0, 0), 30, picture(name, 7, 2, 2), 7),
    }
