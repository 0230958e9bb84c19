"""Sampling by MLX's operations and, where there is one, by the device's kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.device.cpu.kernels import NoKernels, load_kernels
from quire.device.device import current_device, open_device


@pytest.fixture(params=["operations", "kernel"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Choose how tokens are drawn."""
    open_device("auto" if request.param == "kernel" else "mlx", threads=1)
    try:
        if current_device().operations.draws != (request.param == "kernel"):
            pytest.skip(_lacking())
        yield
    finally:
        open_device("auto")


def _lacking() -> str:
    """Return why no kernel draws tokens: the CPU's are not built, or stale, or not in use."""
    try:
        load_kernels(threads=1)
    except NoKernels as error:
        return str(error)
    return "this device has no kernel that draws tokens"
