"""What holds for all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def own_products() -> Iterator[None]:
    """Each file begins with MLX's own BLAS: an engine that a test opens may choose another."""
    yield
    if (blas := sys.modules.get("quire.device.blas")) is not None:
        blas.choose_blas("mlx")
