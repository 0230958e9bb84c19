"""The model's configuration files: the one place where its sizes are chosen."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from training.chat import MODEL_DIR
from training.data.sounds import RATE
from training.tokenizer import NAMED

LAYERS = (
    "sliding_attention",
    "sliding_attention",
    "full_attention",
    "sliding_attention",
    "sliding_attention",
    "full_attention",
    "sliding_attention",
    "full_attention",
)
"""The last two read the keys and values of the fifth and the sixth."""

PATCH = 8
POOLING = 2
SOFT_TOKENS = 70
MEL_BINS = 64
FRAMES = 344
"""Frames of the longest sound, 10 ms each; four are one soft token."""


def text_config() -> dict[str, Any]:
    """Sizes of the language model."""
    return {
        "model_type": "gemma4_text",
        "vocab_size": 3072,
        "vocab_size_per_layer_input": 3072,
        "hidden_size": 256,
        "hidden_size_per_layer_input": 32,
        "intermediate_size": 512,
        "num_hidden_layers": len(LAYERS),
        "layer_types": list(LAYERS),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 64,
        "global_head_dim": 128,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "sliding_window": 96,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4608,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
        },
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "dtype": "bfloat16",
    }


def vision_config() -> dict[str, Any]:
    """Sizes of the vision tower: pictures of about 128 by 128 become about 64 soft tokens."""
    return {
        "model_type": "gemma4_vision",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        "pooling_kernel_size": POOLING,
        "patch_size": PATCH,
        "position_embedding_size": 144,
        "use_clipped_linears": False,
        "standardize": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
    }


def audio_config() -> dict[str, Any]:
    """Sizes of the audio tower: a second of sound becomes 25 soft tokens."""
    return {
        "model_type": "gemma4_audio",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "hidden_act": "silu",
        "subsampling_conv_channels": [MEL_BINS, 16],
        "conv_kernel_size": 5,
        "residual_weight": 0.5,
        "attention_chunk_size": 12,
        "attention_context_left": 13,
        "attention_context_right": 0,
        "attention_logit_cap": 50.0,
        "attention_invalid_logits_value": -1e9,
        "use_clipped_linears": False,
        "rms_norm_eps": 1e-6,
        "gradient_clipping": 1e10,
        "output_proj_dims": 256,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
    }


def processor_config() -> dict[str, Any]:
    """How pictures become patches, and sounds frames."""
    picture = {
        "patch_size": PATCH,
        "pooling_kernel_size": POOLING,
        "max_soft_tokens": SOFT_TOKENS,
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": False,
        "rescale_factor": 1 / 255,
        "image_mean": [0.0, 0.0, 0.0],
        "image_std": [1.0, 1.0, 1.0],
        "resample": 3,
    }
    return {
        "processor_class": "Gemma4Processor",
        "image_seq_length": SOFT_TOKENS,
        "audio_seq_length": 750,
        "audio_ms_per_token": 40,
        "image_processor": {"image_processor_type": "Gemma4ImageProcessor", **picture},
        "feature_extractor": {
            "feature_extractor_type": "Gemma4AudioFeatureExtractor",
            "feature_size": MEL_BINS,
            "sampling_rate": RATE,
        },
        "video_processor": {
            "video_processor_type": "Gemma4VideoProcessor",
            **picture,
            "num_frames": 8,
        },
    }


def write() -> None:
    """Write config.json, generation_config.json and processor_config.json."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(token) for name, token in NAMED.items()}
    ends = [ids["eos_token"], ids["eot_token"], ids["str_token"]]
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "boi_token_id": ids["boi_token"],
        "eoi_token_id": ids["eoi_token"],
        "image_token_id": ids["image_token"],
        "video_token_id": ids["video_token"],
        "boa_token_id": ids["boa_token"],
        "eoa_token_index": ids["eoa_token"],
        "audio_token_id": ids["audio_token"],
        "eos_token_id": ends,
        "text_config": text_config(),
        "vision_config": vision_config(),
        "audio_config": audio_config(),
    }
    generation = {
        "bos_token_id": ids["bos_token"],
        "eos_token_id": ends,
        "pad_token_id": ids["pad_token"],
        "do_sample": False,
    }
    files = {
        "config.json": config,
        "generation_config.json": generation,
        "processor_config.json": processor_config(),
    }
    for name, content in files.items():
        (MODEL_DIR / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    write()
