"""Kernels that run where there is no card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.device.cuda import blocks, encoding
from tests.support.emulated_cuda import emulate


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels that make codes run in an emulation; none is kept beyond the test."""
    for module in (blocks, encoding):
        monkeypatch.setattr(module, "cuda_kernel", emulate)
        module._kernel.cache_clear()
    yield
    for module in (blocks, encoding):
        module._kernel.cache_clear()
