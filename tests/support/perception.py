"""A small Falcon Perception: a Falcon-OCR with heads, which find what is no text."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from tests.support import fused
from tests.support.fused import PROMPTS, converted

__all__ = ["CONFIG", "CONVERTED", "PROMPTS", "converted", "published", "weights"]

CONFIG: dict[str, Any] = fused.CONFIG | {
    "model_type": "falcon_perception",
    "n_heads": 2,
    "n_kv_heads": 1,
    "head_dim": 64,
    "do_segmentation": False,
    "coord_token_id": 240,
    "size_token_id": 241,
    "seg_token_id": 242,
    "coord_enc_dim": 16,
    "coord_dec_dim": 32,
    "coord_out_dim": 64,
    "size_enc_dim": 16,
    "size_dec_dim": 32,
    "size_out_dim": 64,
}
_TEXT = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
}
CONVERTED: dict[str, Any] = {
    **{key: value for key, value in CONFIG.items() if key not in _TEXT},
    "text_config": {ours: CONFIG[key] for key, ours in _TEXT.items()},
}
"""The configuration with the decoder's keys apart, as mlx-vlm may write it."""


def weights() -> dict[str, mx.array]:
    """Return random weights, by this package's names."""
    return fused.weights(CONFIG)


def published(ours: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the tensors, heads included, as their publisher names and lays them out."""
    heads = {}
    for part in ("coord", "size"):
        heads |= {
            f"{part}_encoder.embed.weight": mx.ones((8, 2)),
            f"{part}_encoder.transform.weight": mx.ones((64, 16)),
            f"{part}_decoder.w1.weight": mx.ones((32, 64)),
            f"{part}_decoder.w2.weight": mx.ones((64, 32)),
        }
    return fused.published(ours) | heads
