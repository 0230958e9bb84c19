"""Sampling by MLX's operations and, where there is one, by the device's kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.device.device import current_device, open_device


@pytest.fixture(params=["operations", "kernel"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Choose how tokens are drawn."""
    open_device("auto" if request.param == "kernel" else "mlx", threads=1)
    try:
        if current_device().operations.draws != (request.param == "kernel"):
            pytest.skip(f"no way by {request.param} on this device")
        yield
    finally:
        open_device("auto")
