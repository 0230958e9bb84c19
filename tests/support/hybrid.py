"""A small DeepSeek-VL with two encoders, and pictures for it."""

from __future__ import annotations

from typing import Any

from quire.core.media import MediaItem
from tests.support.photographs import random_patches
from tests.support.seeing import Prompt, prompt
from tests.support.tiny_models import IMAGE

LARGE, SMALL, PATCH = 20, 8, 4
"""Pixels on a side of a picture, and of a patch."""
ROWS = (SMALL // PATCH) ** 2

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_vl_hybrid",
    "text_config": {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": SMALL,
        "patch_size": PATCH,
        "vision_use_head": False,
    },
    "high_res_vision_config": {
        "model_type": "sam_vision_model",
        "hidden_size": 48,
        "mlp_dim": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": LARGE,
        "patch_size": PATCH,
        "window_size": 2,
        "global_attn_indexes": [1, 2],
        "output_channels": 16,
    },
    "image_token_id": IMAGE,
    "tie_word_embeddings": False,
}


def picture(seed: int) -> MediaItem:
    """Return a picture of random colours."""
    features = random_patches(seed, (LARGE // PATCH) ** 2 + ROWS, PATCH)
    return MediaItem.of("image", features, (1,), ROWS, bidirectional=False)


PROMPTS: dict[str, Prompt] = {
    "two": prompt(3, picture(2), picture(3), 8),
    "text alone": prompt(40),
    "a picture": prompt(picture(1), 5),
    "between texts": prompt(20, picture(4), 20),
    "after long text": prompt(150, picture(5), 4),
    "in a second turn": prompt(9, picture(6), 30, picture(7), 7),
}
