"""The servers of `tests/api`: a scripted engine behind the real application; and no settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.api.conftest import serve, shared, tokenizer  # noqa: F401


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty home, and no variable of ours."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    return tmp_path
