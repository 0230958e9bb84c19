"""Tiny models with random weights, written as checkpoints, so that tests open real folders.

The weights are drawn so that greedy answers vary with the whole prompt: larger than a training
run would start from, else the softmax is flat and a wrong position changes no token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from quire.core.media import MediaItem, PlacedMedia
from quire.models.base import named_parameters
from quire.models.registry import build
from quire.models.weights.names import renamed

VOCABULARY = 256
WINDOW = 32
IMAGE, BEGIN_IMAGE, END_IMAGE = 255, 254, 253
VIDEO, AUDIO, BEGIN_AUDIO, END_AUDIO = 252, 251, 250, 249
MEL_BINS = 16
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def llama_config(**changes: Any) -> dict[str, Any]:
    """Return Llama 3.1 in small: grouped queries, stretched RoPE, an untied head."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    } | changes


def gemma4_config(**changes: Any) -> dict[str, Any]:
    """Return Gemma 4 31B in small: two head sizes, full layers with one projection for K and V."""
    return {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
        },
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    } | changes


def gemma4_moe_config(**changes: Any) -> dict[str, Any]:
    """Return Gemma 4 26B-A4B in small: experts beside the dense block."""
    moe = {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    }
    return gemma4_config(**(moe | changes))


def gemma4_ple_config(**changes: Any) -> dict[str, Any]:
    """Return Gemma 4 E2B in small: per-layer embeddings, shared KV, wide MLPs in the sharing
    layers.
    """
    small = {
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        "attention_k_eq_v": False,
        "num_global_key_value_heads": None,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    }
    return gemma4_config(**(small | changes))


def gemma4_vision_config(text: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return Gemma 4 with its vision encoder in small: 2 x 2 patches of 4 x 4 pixels are a soft
    token.

    Args:
        text: the text part; if not given, `gemma4_config()` whose images are seen whole.
        changes: of the vision part.
    """
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 24,
        "use_clipped_linears": True,
        "standardize": True,
    }
    return {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text or gemma4_config(use_bidirectional_attention="vision"),
        "vision_config": vision | changes,
        "audio_config": None,
        "image_token_id": IMAGE,
        "boi_token_id": BEGIN_IMAGE,
        "eoi_token_id": END_IMAGE,
        "video_token_id": VIDEO,
        "audio_token_id": AUDIO,
        "boa_token_id": BEGIN_AUDIO,
        "eoa_token_index": END_AUDIO,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }


def gemma4_audio_config(text: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return Gemma 4 with both of its encoders in small: four frames of 16 bins are a row.

    Args:
        changes: of the audio part.
    """
    audio = {
        "model_type": "gemma4_audio",
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "subsampling_conv_channels": [MEL_BINS, 8],
        "conv_kernel_size": 5,
        "attention_chunk_size": 4,
        "attention_context_left": 5,
        "attention_context_right": 0,
        "use_clipped_linears": True,
        "output_proj_dims": 40,
    }
    return gemma4_vision_config(text, standardize=False) | {"audio_config": audio | changes}


def sound(frames: int, seed: int = 0) -> MediaItem:
    """Return a random spectrogram for a model of `gemma4_audio_config`."""
    rng = np.random.default_rng(seed)
    features = rng.normal(-2.0, 2.0, (frames, MEL_BINS)).astype(np.float32).tobytes()
    tokens = -(-frames // 4)
    return MediaItem.of("audio", features, (frames, MEL_BINS), tokens, bidirectional=False)


def prompt_with(image: MediaItem, count: int) -> tuple[list[int], list[PlacedMedia]]:
    """Return a text for a model of `gemma4_vision_config` with an image in it so many times."""
    tokens, images = [2, 40, 41, 42], []
    for turn in range(count):
        tokens.append(BEGIN_IMAGE)
        images.append(PlacedMedia(len(tokens), image))
        tokens += [IMAGE] * image.tokens + [END_IMAGE]
        tokens += [(7 * i * i + 3 * i + turn) % 240 for i in range(20)]
    return tokens, images


def qwen3_config(**changes: Any) -> dict[str, Any]:
    """Return Qwen3 in small."""
    qwen3 = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "use_sliding_window": False,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    }
    return llama_config(**(qwen3 | changes))


def qwen3_moe_config(**changes: Any) -> dict[str, Any]:
    """Return Qwen3-MoE in small, its middle layer dense."""
    moe = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    }
    return qwen3_config(**(moe | changes))


def qwen3_5_config(**changes: Any) -> dict[str, Any]:
    """Return Qwen3.5 in small: three delta-net layers, one of full attention."""
    return {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    } | changes


def qwen3_5_moe_config(**changes: Any) -> dict[str, Any]:
    """Return Qwen3.5 with experts, in small."""
    moe = {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    }
    return qwen3_5_config(**(moe | changes))


CONFIGS = {
    "llama": llama_config,
    "qwen3": qwen3_config,
    "qwen3_moe": qwen3_moe_config,
    "qwen3_5": qwen3_5_config,
    "qwen3_5_moe": qwen3_5_moe_config,
    "gemma4": gemma4_config,
    "gemma4_moe": gemma4_moe_config,
    "gemma4_ple": gemma4_ple_config,
}


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Return float32 tensors with this package's names, the same for the same config and seed."""
    model = build(config)
    key = mx.random.key(seed)
    weights = {}
    for name, place in sorted(named_parameters(model).items()):
        key, draw = mx.random.split(key)
        noise = mx.random.normal(place.shape, key=draw)
        if name.endswith("conv1d.weight"):
            weights[name] = 0.6 * noise
        elif place.ndim == 0:  # bounds of a clipped layer, near enough to matter
            weights[name] = (0.7 + 0.1 * noise) * (-1 if name.endswith("_min") else 1)
        elif place.ndim == 1:  # norms and scales stay near one
            weights[name] = 1.0 + 0.1 * noise
        elif "embed" in name:
            weights[name] = 0.04 * noise  # small, else a tied head repeats the token it was given
        else:
            over_all = place.ndim == 4 and place.shape[-1] > 1  # a convolution over all channels
            seen = place[0].size if over_all else place.shape[-1]
            weights[name] = 1.5 * noise * seen**-0.5
    return weights


def with_small_scores(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return Gemma 4's weights with attention scores around one, so that rounding stays small.

    It does not divide scores by the root of the head's size: its norms carry that.
    """
    return {
        name: array * array.size**-0.5 if name.endswith("q_norm.weight") else array
        for name, array in weights.items()
    }


def write_model(
    folder: Path,
    config: dict[str, Any],
    seed: int = 0,
    weights: dict[str, mx.array] | None = None,
) -> Path:
    """Writes `config.json` and `model.safetensors` into `folder`, which is made if missing.

    Args:
        weights: by this package's names, if not `random_weights` of the seed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weights = weights or random_weights(config, seed)
    norms = _NORMS.get(config.get("text_config", config).get("model_type"))
    if norms is not None and config.get("use_post_norm", True):
        weights = {renamed(name, norms): array for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


GLM_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
"""Checkpoints' names of the norms: one of the names means another norm here."""
_NORMS = {
    "glm4v_text": GLM_NORMS,
    "glm_ocr_text": GLM_NORMS,
    "hyperclovax": {
        "post_attention_layernorm": "post_norm1",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_norm2",
    },
}
"""By `model_type`."""


def tiny_model(folder: Path, name: str, seed: int = 0) -> Path:
    """Writes the tiny model `name`, one of `CONFIGS`, into `folder`."""
    return write_model(folder, CONFIGS[name](), seed)
