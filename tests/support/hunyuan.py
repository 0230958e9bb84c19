"""A small HunyuanOCR."""

from __future__ import annotations

from typing import Any

from tests.support.seeing import PATCH
from tests.support.tiny_models import IMAGE

CONFIG: dict[str, Any] = {
    "model_type": "hunyuan_vl",
    "text_config": {
        "model_type": "hunyuan_vl_text",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "alpha": 1000.0,
            "factor": 1.0,
            "mrope_section": [2, 2, 2, 2],
        },
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    "vision_config": {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": PATCH,
        "max_image_size": 24,
        "out_hidden_size": 64,
    },
    "image_token_id": IMAGE,
}
