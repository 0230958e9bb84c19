"""Segments need the compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.device.device import current_device, open_device


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    open_device("auto", threads=1)
    if current_device().kernels is None:
        pytest.skip("segments are made of the compiled kernels")
    yield
    open_device("auto")
