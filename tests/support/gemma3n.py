"""Gemma 3n in small, which hears, or sees too."""

from __future__ import annotations

from typing import Any

from tests.support.families import CONFIGS


def gemma3n_config() -> dict[str, Any]:
    """Return Gemma 3n that hears: 16 frames of 16 bins are a row, of which a sound has 20."""
    return {
        "model_type": "gemma3n",
        "text_config": CONFIGS["gemma3n_text"],
        "audio_config": {
            "model_type": "gemma3n_audio",
            "hidden_size": 48,
            "conf_num_hidden_layers": 2,
            "conf_num_attention_heads": 3,
            "input_feat_size": 16,
            "sscp_conv_channel_size": [8, 4],
            "conf_attention_chunk_size": 4,
            "conf_attention_context_left": 5,
            "vocab_size": 8,
            "vocab_offset": 248,
        },
        "audio_soft_tokens_per_image": 20,
        "audio_token_id": 249,
    }


def gemma3n_seeing_config() -> dict[str, Any]:
    """Return Gemma 3n that also sees: 32 by 32 pixels are a row, of which a picture has 16."""
    inverted = {"block_type": "uir", "dw_kernel_size_end": 0, "exp_ratio": 2.0, "act_layer": None}
    edge = {"block_type": "er", "exp_kernel_size": 3, "exp_ratio": 2.0, "out_chs": 8}
    edge |= {"act_layer": None}
    attending = {"block_type": "mqa", "dw_kernel_size": 3, "stride": 1, "num_heads": 2}
    attending |= {"key_dim": 8, "value_dim": 8, "act_layer": None}

    def bottleneck(channels: int, start: int, middle: int, stride: int) -> dict[str, Any]:
        sides = {"dw_kernel_size_start": start, "dw_kernel_size_mid": middle}
        return {**inverted, **sides, "out_chs": channels, "stride": stride}

    stages = [
        [edge | {"stride": 2}, edge | {"stride": 1}],
        [bottleneck(16, 3, 5, 2), bottleneck(16, 5, 0, 1)],
        [
            bottleneck(24, 5, 5, 2),
            attending | {"out_chs": 24, "kv_stride": 2},
            bottleneck(24, 0, 0, 1),
        ],
        [
            bottleneck(32, 5, 5, 2),
            attending | {"out_chs": 32, "kv_stride": 1},
            bottleneck(32, 0, 0, 1),
        ],
    ]
    return gemma3n_config() | {
        "vision_config": {
            "model_type": "gemma3n_vision",
            "architecture": "mobilenetv5_300m_enc",
            "model_args": {"block_args": stages, "stem_size": 8, "msfa_output_resolution": 4},
            "hidden_size": 2048,
            "vocab_size": 8,
            "vocab_offset": 240,
        },
        "vision_soft_tokens_per_image": 16,
        "image_token_id": 255,
    }
