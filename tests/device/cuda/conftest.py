"""Kernels that run where there is no card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.emulated_coding import coding_emulated


@pytest.fixture
def emulated() -> Iterator[None]:
    """Let the kernels that make codes run in an emulation."""
    with coding_emulated():
        yield
