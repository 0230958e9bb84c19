"""Checkpoints of drafters that read hidden states, with random weights: EAGLE-3, DFlash."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from quire.models.base import named_parameters
from quire.models.decoder import DecoderModel
from quire.models.dflash import DFlash, DFlashArguments
from quire.models.eagle import EagleArguments, EagleHead
from quire.models.registry import build
from quire.models.weights.loader import LoadedModel

DRAFT_VOCABULARY = 128


def head_config(loaded: LoadedModel, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a head for a model, as SpecForge writes it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": loaded.model.vocab_size,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "hidden_size": loaded.config["hidden_size"],
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]},
        **changes,
    }


def speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration as vLLM's speculators write it."""
    outputs = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    own = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "target_hidden_size")
    return {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {
            name: value for name, value in config.items() if name not in (*own, "eagle_config")
        },
        "eagle_aux_hidden_state_layer_ids": [each + 1 for each in outputs],
        **{name: config[name] for name in own if name in config},
    }


def write_head(
    folder: Path, loaded: LoadedModel, *, own_table: bool = False, **changes: Any
) -> dict[str, mx.array]:
    """Write a head, and return its tensors by the published names."""
    config = head_config(loaded, **changes)
    described = build({key: each for key, each in config.items() if key != "eagle_config"})
    assert isinstance(loaded.model, DecoderModel)
    assert isinstance(described, DecoderModel)
    args = EagleArguments.of(config)
    head = EagleHead(args, described.description, loaded.model, own_table=own_table)
    drawn = _drawn(head)
    weights = {name.replace("layers.0.", "midlayer."): each for name, each in drawn.items()}
    if "d2t" in weights:  # every second token
        weights["d2t"] = mx.arange(DRAFT_VOCABULARY).astype(mx.int64)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return weights


def write_dflash(folder: Path, loaded: LoadedModel, **changes: Any) -> dict[str, mx.array]:
    """Write a DFlash drafter, and return its tensors by the published names."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": loaded.model.vocab_size,
        "hidden_size": loaded.config["hidden_size"],
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "block_size": 8,
        "num_target_layers": 3,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
        **changes,
    }
    assert isinstance(loaded.model, DecoderModel)
    described = build({key: each for key, each in config.items() if key != "dflash_config"})
    assert isinstance(described, DecoderModel)
    drafter = DFlash(DFlashArguments.of(config), described.description, loaded.model)
    weights = _drawn(drafter)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return weights


def _drawn(module: nn.Module) -> dict[str, mx.array]:
    """Draw a module's weights."""
    weights = {}
    for number, (name, place) in enumerate(sorted(named_parameters(module).items())):
        noise = mx.random.normal(place.shape, key=mx.random.key(number))
        near_one = 1 + 0.1 * noise
        weights[name] = near_one if place.ndim == 1 else 1.5 * noise * place.shape[-1] ** -0.5
    return weights
