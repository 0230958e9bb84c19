"""Runs Hugging Face transformers on the same folder that `open_model` reads."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from quire.core.media import MediaItem, PlacedMedia

torch.set_num_threads(1)

RIGHT_SINCE = {
    "mamba2": ("5.23", "it normalises all groups as one"),
    "granitemoehybrid": ("5.23", "it normalises all groups as one"),
    "gemma3n_text": ("5.23", "it has no answer for tokens beyond the per-layer table"),
    "minimax_m2": ("5.18", "it rotates whole heads"),
}
"""The first release of transformers that computes what the published code does, by model type, and
what those before it do instead."""


def save_random(
    config: Any, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Any:
    """Return a transformers model of `config` with random weights, saved to `folder` in `dtype`.

    What it computes, it computes in float32, from the weights as they were saved. Every parameter
    is drawn anew: the library's own initialisation leaves norms and scales at one and projections
    so small that attention hardly matters.

    Skips the test where this release of transformers is no oracle for the family.
    """
    since, instead = RIGHT_SINCE.get(config.model_type, ("0", ""))
    if Version(transformers.__version__) < Version(since):
        pytest.skip(f"transformers {transformers.__version__} is older than {since}: {instead}")
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText if _nested(config) else None
    auto = model or transformers.AutoModelForCausalLM
    create = auto.from_config
    if config.model_type == "mistral4":  # which that class does not know
        create = transformers.Mistral4ForCausalLM._from_config
    reference = create(config, attn_implementation="eager", dtype=torch.float32)
    draw_anew(reference)
    with torch.no_grad():
        saved = {name: value.to(dtype) for name, value in reference.state_dict().items()}
        reference.load_state_dict(saved)
    reference.save_pretrained(folder, state_dict=saved)
    return reference.eval()


def draw_anew(model: Any) -> None:
    """Random parameters and buffers, in place.

    Drawn so that float32 is exact enough to compare by: scores of some ten or states of one token
    make a hundred times as much of each rounding (`test_rounding.py`).
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_draw(name, weight))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.2 * torch.rand_like(buffer))
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
            elif name.endswith(("std_bias", "std_scale")):
                buffer.copy_(1.0 + 0.3 * torch.randn_like(buffer))
            elif name.endswith(("put_min", "put_max")):  # bounds of inputs and outputs
                sign = -1.0 if name.endswith("min") else 1.0
                buffer.copy_(sign * (0.5 + 0.5 * torch.rand_like(buffer)))
        for module in model.modules():
            # Gemma 4 does not divide scores by the root of the head's size: its norms carry that.
            if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm"):
                module.q_norm.weight.mul_(2.5 * module.head_dim**-0.5)
        if hasattr(model, "tie_weights"):
            model.tie_weights()


def _nested(config: Any) -> bool:
    return "text_config" in config.sub_configs


def _draw(name: str, weight: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(weight)
    if name.endswith("conv1d.weight"):
        return 0.6 * noise
    if name.endswith(
        ("linear_attn.A_log", "forget_gate.A_log")
    ):  # a state that lasts for more than a token or two
        return -2.0 + 0.5 * noise
    if ".conv2d" in name or (".timm_model." in name and weight.ndim == 4):
        return 1.5 * noise * weight[0].numel() ** -0.5
    if weight.shape == (1,) and "gate" in name:  # else next to nothing comes through
        return 1.0 + 0.3 * noise
    if weight.ndim == 1:  # biases and zero-centred norms start at zero, the rest near one
        return float(weight.any()) + 0.1 * noise
    if "embed" in name:
        return 0.04 * noise  # small, else a tied head repeats the token it was given
    return 1.5 * noise * weight.shape[-1] ** -0.5


class _Wide(TorchDispatchMode):
    """Casts to float32, which published code has in norms, softmax and RoPE, become float64."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(
            lambda each: torch.float64 if each is torch.float32 else each, (args, kwargs or {})
        )
        return function(*args, **kwargs)


def float64_logits(reference: Any, tokens: list[int], **media: Any) -> np.ndarray:
    """Return logits `[len(tokens), vocab]` of the same weights and inputs, computed in float64."""

    def widen(each: Any) -> Any:
        floats = isinstance(each, torch.Tensor) and each.is_floating_point()
        return each.double() if floats else each

    wide = deepcopy(reference).double()
    if hasattr(wide, "set_experts_implementation"):  # the others take no float64
        wide.set_experts_implementation("eager")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), _Wide():
            inputs = tree_map(widen, media)
            logits = wide(torch.tensor([tokens]), use_cache=False, **inputs).logits[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert logits.dtype == torch.float64
    return np.asarray(logits)


def reference_logits(reference: Any, tokens: list[int]) -> mx.array:
    """Return logits `[len(tokens), vocab]`."""
    with torch.no_grad():
        logits = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    return mx.array(logits.float().numpy().astype(np.float32))


def reference_greedy(reference: Any, prompt: list[int], count: int, **media: Any) -> list[int]:
    """Return greedy continuation of `count` tokens, end tokens ignored; `media` as the model takes
    it.
    """
    inputs = {"attention_mask": torch.ones(1, len(prompt), dtype=torch.long)} | media
    with torch.no_grad():
        out = reference.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
            **inputs,
        )
    return out[0, len(prompt) :].tolist()


def reference_answer(
    reference: Any, tokens: list[int], count: int, **media: Any
) -> tuple[Any, list[int]]:
    """Return logits `[len(tokens), vocab]`, and `reference_greedy`; `media` as the model takes
    it.
    """
    with torch.no_grad():
        logits = reference(torch.tensor([tokens]), **media).logits[0]
    greedy = reference_greedy(reference, tokens, count, **media)
    assert len(set(greedy)) > 1, "a degenerate continuation proves nothing"
    return logits, greedy


def reference_image_logits(
    reference: Any, tokens: list[int], images: Sequence[PlacedMedia]
) -> mx.array:
    """Return logits `[len(tokens), vocab]` of a sequence with media."""
    with torch.no_grad():
        logits = reference(
            torch.tensor([tokens]), use_cache=False, **media_inputs(tokens, images)
        ).logits[0]
    return mx.array(logits.float().numpy())


def media_inputs(tokens: list[int], media: Sequence[PlacedMedia]) -> dict[str, torch.Tensor]:
    """Return media as the processor gives them to the model, and which tokens stand for them."""
    kinds = torch.zeros(1, len(tokens), dtype=torch.long)
    for each in media:
        kinds[0, each.start : each.end] = 1 + _KINDS.index(each.item.kind)
    return {"mm_token_type_ids": kinds} | _inputs([each.item for each in media])


def reference_rows(reference: Any, items: Sequence[MediaItem]) -> list[mx.array]:
    """Return what towers and projectors make of items, `[tokens, hidden]` of each.

    Items of a kind are one batch, as in `media_inputs`, so that they are rounded alike.
    """
    rows: dict[int, mx.array] = {}
    for kind in _KINDS:
        places = [place for place, item in enumerate(items) if item.kind == kind]
        if not places:
            continue
        batch = [items[place] for place in places]
        with torch.no_grad():
            out = getattr(reference.model, f"get_{kind}_features")(**_inputs(batch))
        if kind == "audio":
            both = zip(out.pooler_output, out.attention_mask, strict=True)
            parts = [each[mask] for each, mask in both]
        else:
            parts = list(torch.cat(out.pooler_output).split([item.tokens for item in batch]))
        for place, part in zip(places, parts, strict=True):
            rows[place] = mx.array(part.float().numpy())
    return [rows[place] for place in range(len(items))]


_KINDS = ("image", "video", "audio")


def _inputs(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """Return inputs as a processor gives them to the model."""
    images, frames, sounds = ([item for item in items if item.kind == kind] for kind in _KINDS)
    inputs = _pixels(images) if images else {}
    if frames:
        pixels = _pixels(frames)
        inputs["pixel_values_videos"] = pixels["pixel_values"]
        inputs["video_position_ids"] = pixels["image_position_ids"]
        inputs["num_frames_per_video"] = torch.tensor([len(frames)])
    return inputs | (_spectrograms(sounds) if sounds else {})


def _spectrograms(sounds: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """Return spectrograms padded to the longest, and a mask of what is not padding."""
    longest, bins = max(each.shape[0] for each in sounds), sounds[0].shape[1]
    features = torch.zeros(len(sounds), longest, bins)
    mask = torch.zeros(len(sounds), longest, dtype=torch.bool)
    for row, each in enumerate(sounds):
        values = np.frombuffer(each.features, np.float32).reshape(each.shape)
        features[row, : len(values)] = torch.from_numpy(values.copy())
        mask[row, : len(values)] = True
    return {"input_features": features, "input_features_mask": mask}


def _pixels(images: list[MediaItem]) -> dict[str, torch.Tensor]:
    """Return what the image processor gives: colours from 0 to 1, and (x, y) of each patch.

    Padded to the most patches; padding has no place.
    """
    patches = [rows * columns for rows, columns in (each.shape for each in images)]
    values = len(images[0].features) // patches[0]
    pixels = torch.zeros(len(images), max(patches), values)
    places = torch.full((len(images), max(patches), 2), -1)
    for row, (each, count) in enumerate(zip(images, patches, strict=True)):
        raw = np.frombuffer(each.features, np.uint8).reshape(count, values)
        pixels[row, :count] = torch.from_numpy(raw.astype(np.float32) / 255)
        index = torch.arange(count)
        columns = each.shape[1]
        places[row, :count] = torch.stack([index % columns, index // columns], dim=-1)
    return {"pixel_values": pixels, "image_position_ids": places}
