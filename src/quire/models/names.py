"""Tensor names that differ by who wrote the checkpoint, not by family."""

from __future__ import annotations


def without_wrapper(name: str) -> str:
    """The name in a text-only checkpoint of a tensor of the language model.

    A multimodal checkpoint holds it under `model.language_model.` (Hugging Face) or
    `language_model.model.` (mlx-vlm, which writes models of text so, too); the head has no `model.`
    in front.
    """
    inner = name.removeprefix("model.").removeprefix("language_model.")
    return inner if inner.startswith("lm_head.") else "model." + inner.removeprefix("model.")
