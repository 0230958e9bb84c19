"""A small Llama 3.2 Vision, and pictures that its tokens look at."""

from __future__ import annotations

from functools import partial
from typing import Any

from quire.core.media import MediaItem
from tests.support.photographs import random_patches
from tests.support.seeing import Prompt
from tests.support.seeing import prompt as spelled

MARK = 260
"""Placeholder tokens of a picture: the first ids behind the vocabulary."""
PATCH, SIDE = 4, 4
CONFIG: dict[str, Any] = {
    "model_type": "mllama",
    "image_token_index": MARK,
    "text_config": {
        "model_type": "mllama_text_model",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "cross_attention_layers": [1, 3],
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    "vision_config": {
        "model_type": "mllama_vision_model",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_global_layers": 2,
        "attention_heads": 4,
        "intermediate_size": 80,
        "intermediate_layers_indices": [0, 2],
        "vision_output_dim": 144,
        "image_size": PATCH * SIDE,
        "patch_size": PATCH,
        "max_num_tiles": 4,
        "supported_aspect_ratios": [
            [1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1],
        ],
        "hidden_act": "gelu",
        "norm_eps": 1e-5,
    },
}  # fmt: skip


def picture(seed: int, rows: int, columns: int) -> MediaItem:
    """Return a picture of so many tiles: random colours, in patches that differ from each other."""
    features = random_patches(seed, rows * columns * SIDE**2, PATCH)
    return MediaItem.of("image", features, (rows, columns), 1, bidirectional=False)


# One token stands for a whole picture.
prompt = partial(spelled, spell=lambda item: ([], [MARK], []))
PROMPTS: dict[str, Prompt] = {
    "text alone": prompt(40),
    "a picture": prompt(picture(1, 2, 2), 9),
    "two of different sizes": prompt(3, picture(2, 1, 1), picture(3, 1, 3), 8),
    "between texts": prompt(20, picture(4, 2, 1), 20),
    "after long text": prompt(150, picture(5, 1, 2), 4),
    "in a second turn": prompt(9, picture(6, 1, 1), 30, picture(7, 1, 4), 7),
}
