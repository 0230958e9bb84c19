"""Runs Hugging Face transformers on the same folder that `open_model` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import transformers

torch.set_num_threads(1)


def save_random(config: Any, folder: Path, seed: int = 0) -> Any:
    """A transformers model of `config` with random float32 weights, saved to `folder`.

    Every parameter is drawn anew: the library's own initialisation leaves norms and scales at one
    and projections so small that attention hardly matters.
    """
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText if _nested(config) else None
    auto = model or transformers.AutoModelForCausalLM
    reference = auto.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            weight.copy_(_draw(name, weight))
        for name, buffer in reference.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.2 * torch.rand_like(buffer))
    reference.tie_weights()
    reference.save_pretrained(folder)
    return reference.eval()


def _nested(config: Any) -> bool:
    return "text_config" in type(config).sub_configs_defaults if config.sub_configs else False


def _draw(name: str, weight: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(weight)
    if name.endswith("conv1d.weight"):
        return 0.6 * noise
    if weight.ndim == 1:  # biases and zero-centred norms start at zero, the rest near one
        return float(weight.any()) + 0.1 * noise
    if "embed" in name:
        return 0.04 * noise  # small, else a tied head repeats the token it was given
    return 1.5 * noise * weight.shape[-1] ** -0.5


def reference_logits(reference: Any, tokens: list[int]) -> mx.array:
    """Logits `[len(tokens), vocab]`."""
    with torch.no_grad():
        logits = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    return mx.array(logits.float().numpy().astype(np.float32))


def reference_greedy(reference: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation of `count` tokens, end tokens ignored."""
    with torch.no_grad():
        out = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
