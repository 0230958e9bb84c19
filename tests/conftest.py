"""What holds for all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A busy machine is no failure: an example may take as long as it likes.
settings.register_profile("quire", deadline=None)
settings.load_profile("quire")


@pytest.fixture(autouse=True, scope="module")
def own_products() -> Iterator[None]:
    """Each file begins with MLX's own products: an engine that a test opens may choose others."""
    yield
    if (device := sys.modules.get("quire.device.device")) is not None:
        device.current_device().choose_products("mlx")
