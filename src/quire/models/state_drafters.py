"""Descriptions of drafters that read a model's hidden states, checked against that model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.description import Description
from quire.models.registry import build


def description_of(
    kind: str, folder: Path, text: Mapping[str, Any], model: LanguageModel
) -> tuple[Description, DecoderModel]:
    """Return the description of a drafter's layers, and the model that it drafts for.

    Args:
        kind: the drafter's name in messages, with its article.
        text: configuration of the layers.

    Raises:
        ModelError: the model's family gives no hidden states.
    """
    described = build(dict(text))
    if not isinstance(model, DecoderModel) or not isinstance(described, DecoderModel):
        said = f"{folder} is {kind}, which this family does not take"
        raise ModelError(said, setting="speculate")
    return described.description, model


def check_sizes(kind: str, folder: Path, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Raise `ModelError` where a drafter's size is not the model's.

    Args:
        sizes: the drafter's and the model's, by name.
    """
    for name, (ours, theirs) in sizes.items():
        if ours != theirs:
            raise ModelError(
                f"{folder} is {kind} for another model: its {name} is {ours}, the model's {theirs}",
                setting="speculate",
            )
