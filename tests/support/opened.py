"""Tiny models, each written and opened once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.models.weights.loader import LoadedModel, open_model
from tests.support.tiny_models import tiny_model

Open = Callable[[str], LoadedModel]


def opener(folders: pytest.TempPathFactory) -> Open:
    """Opens a tiny model by its name, in float32."""
    known: dict[str, LoadedModel] = {}

    def find(name: str) -> LoadedModel:
        if name not in known:
            folder = tiny_model(Path(folders.mktemp(name)), name)
            known[name] = open_model(str(folder), dtype="float32")
        return known[name]

    return find
