"""The compiled kernels, for tests that need them."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import CPU_KERNELS
from quire.device.cpu.kernels import NoKernels, load_kernels

ELSEWHERE = {
    "x86_64": ("i8mm", "dotprod", "neon"),
    "aarch64": ("amx", "vnni", "avx512", "avxvnni", "avx2"),
}
"""Instruction sets that no processor of a machine's architecture has."""
HERE = [name for name in CPU_KERNELS if name not in ELSEWHERE.get(platform.machine(), ())]


@pytest.fixture(scope="session")
def compiled() -> Any:
    """Return the extension. Without a compiler there is none, and the engine goes without."""
    if mx.default_device() != mx.cpu:
        pytest.skip("kernels for CPUs")
    try:
        return load_kernels(threads=1).ops
    except NoKernels as error:
        pytest.skip(str(error))


@pytest.fixture(params=HERE)
def ops(compiled: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield the extension with each instruction set that this processor has."""
    if not compiled.use(request.param):
        pytest.skip(f"no {request.param} here")
    yield compiled
    compiled.use("")
