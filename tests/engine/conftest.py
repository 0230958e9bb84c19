"""Tiny models, opened once a module."""

from __future__ import annotations

import pytest

from tests.support.new_memory import new_memory as new_memory
from tests.support.opened import Open, opener


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens a tiny model by its name, in float32."""
    return opener(tmp_path_factory)
