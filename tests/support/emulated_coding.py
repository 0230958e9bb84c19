"""The kernels that make codes, emulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.device.cuda import blocks, encoding
from tests.support.emulated_cuda import emulate


@contextmanager
def coding_emulated() -> Iterator[None]:
    """Emulate the coding kernels on the CPU; none is kept beyond the block."""
    modules = (blocks, encoding)
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "cuda_kernel", emulate)
            module._kernel.cache_clear()
        yield
    for module in modules:
        module._kernel.cache_clear()
