"""Writes golden.safetensors: what transformers answers for each tiny model.

Run it after a change of the tiny models: `python -m tests.models.make_golden` (needs torch).
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers

from tests.models import oracle
from tests.models.solo import picture
from tests.support import tiny_models

GOLDEN = Path(__file__).with_name("golden.safetensors")
PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(45)]
ROWS = slice(None, None, 3)  # of the logits; enough to see an error anywhere, and a third the size
TOKENS = 100
PICTURE = {"rows": 12, "columns": 16, "values": 48, "tokens": 48}

_CONFIG_CLASSES = {
    "gemma4_text": transformers.Gemma4TextConfig,
    "llama": transformers.LlamaConfig,
    "qwen3": transformers.Qwen3Config,
    "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig,
    "qwen3_5_text": transformers.Qwen3_5TextConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
}


def reference_for(name: str) -> torch.nn.Module:
    """Return the transformers model with the weights of the tiny model `name`."""
    config = tiny_models.CONFIGS[name]()
    weights = {
        key: torch.from_numpy(np.array(array))
        for key, array in tiny_models.random_weights(config).items()
    }
    for key in [key for key in weights if key.endswith("experts.gate_proj.weight")]:
        base = key.removesuffix(".gate_proj.weight")
        parts = [weights.pop(f"{base}.{part}_proj.weight") for part in ("gate", "up", "down")]
        weights[f"{base}.gate_up_proj"] = torch.cat(parts[:2], dim=1)
        weights[f"{base}.down_proj"] = parts[2]
    if config["model_type"].startswith("qwen3_5"):
        for key in weights:
            if key.endswith(".conv1d.weight"):
                weights[key] = weights[key].transpose(-1, -2).contiguous()
            elif key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
                weights[key] = weights[key] - 1.0
    if config["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    reference = transformers.AutoModelForCausalLM.from_config(
        _CONFIG_CLASSES[config["model_type"]](**config), attn_implementation="eager"
    )
    reference.load_state_dict(weights)
    return reference.eval()


def reference_with_vision() -> torch.nn.Module:
    """Return the transformers model with the weights of the tiny model that reads images."""
    config = tiny_models.gemma4_vision_config()
    weights = {}
    drawn = tiny_models.with_small_scores(tiny_models.random_weights(config))
    for key, array in drawn.items():
        inner = key.removeprefix("model.")
        part = "model.language_model." if inner != key else "model."
        weights[part + inner] = torch.from_numpy(np.array(array))
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"]
    reference = transformers.AutoModelForImageTextToText.from_config(
        transformers.Gemma4Config(**config), attn_implementation="eager"
    )
    reference.load_state_dict(weights)
    return reference.eval()


def main() -> None:
    golden: dict[str, mx.array] = {}
    for name in tiny_models.CONFIGS:
        reference = reference_for(name)
        golden[f"{name}.logits"] = oracle.reference_logits(reference, PROMPT)[ROWS]
        tokens = oracle.reference_greedy(reference, PROMPT, TOKENS)
        golden[f"{name}.tokens"] = mx.array(tokens, dtype=mx.int32)
        print(f"{name}: {len(set(tokens))} different tokens of {TOKENS}")
    reference = reference_with_vision()
    tokens, images = tiny_models.prompt_with(picture(**PICTURE), count=1)
    logits = oracle.reference_image_logits(reference, tokens, images)
    golden["gemma4_vision.logits"] = logits[ROWS]
    golden["gemma4_vision.features"] = oracle.reference_rows(reference, [images[0].item])[0]
    mx.save_safetensors(str(GOLDEN), golden)
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
