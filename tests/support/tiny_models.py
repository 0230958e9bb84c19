"""Tiny models with random weights, written as checkpoints, so that tests open real folders.

The weights are drawn so that greedy answers vary with the whole prompt: larger than a training
run would start from, else the softmax is flat and a wrong position changes no token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from quire.models.registry import family

VOCABULARY = 256
WINDOW = 32


def llama_config(**changes: Any) -> dict[str, Any]:
    """Llama 3.1 in small: grouped queries, stretched RoPE, an untied head."""
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


CONFIGS = {
    "llama": llama_config,
}


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Float32 tensors with this package's names, the same for the same config and seed."""
    model = family(config["model_type"]).from_config(config)
    key = mx.random.key(seed)
    weights = {}
    for name, place in sorted(tree_flatten(model.parameters())):
        key, draw = mx.random.split(key)
        noise = mx.random.normal(place.shape, key=draw)
        if place.ndim == 1:  # norms and scales stay near one
            weights[name] = 1.0 + 0.1 * noise
        elif "embed" in name:
            weights[name] = 0.5 * noise
        else:
            weights[name] = 1.5 * noise * place.shape[-1] ** -0.5
    return weights


def write_model(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Writes `config.json` and `model.safetensors` into `folder`, which is made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(
        str(folder / "model.safetensors"), random_weights(config, seed), {"format": "mlx"}
    )
    return folder


def tiny_model(folder: Path, name: str, seed: int = 0) -> Path:
    """Writes the tiny model `name`, one of `CONFIGS`, into `folder`."""
    return write_model(folder, CONFIGS[name](), seed)
