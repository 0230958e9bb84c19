"""OpenBLAS in the place of MLX's own BLAS: the same numbers, and a way back."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterator

import mlx.core as mx
import pytest

from quire.device import blas

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or mx.default_device() != mx.cpu, reason="MLX's Linux CPU wheel only"
)


@pytest.fixture
def slot() -> Iterator[ctypes.c_size_t]:
    """Yield the address that MLX calls: its own BLAS's before a test and after it."""
    blas.choose_blas("mlx")
    mx.eval(mx.ones((2, 2)) @ mx.ones((2, 2)))  # the linker fills it in at the first call
    yield ctypes.c_size_t.from_address(blas._slot_of_mlx())
    blas.choose_blas("mlx")


def test_the_same_numbers(slot: ctypes.c_size_t) -> None:
    left, right = mx.random.normal((256, 512)), mx.random.normal((512, 512))
    mx.eval(left, right)
    own = left @ right
    mx.eval(own)
    blas.choose_blas("openblas")
    assert mx.abs(left @ right - own).max().item() < 1e-3  # of sums of 512 products


def test_there_and_back(slot: ctypes.c_size_t) -> None:
    own = slot.value
    blas.choose_blas("openblas")
    chosen = slot.value
    assert chosen != own
    blas.choose_blas("openblas")
    assert slot.value == chosen
    blas.choose_blas("mlx")
    assert slot.value == own


def test_wrong_products_are_noticed(
    slot: ctypes.c_size_t, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    idle = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    monkeypatch.setattr(blas, "_function_of_openblas", lambda threads: idle)
    before = slot.value
    with caplog.at_level(logging.WARNING):
        blas.choose_blas("openblas")
    assert slot.value == before
    assert "its products are wrong on this machine" in caplog.text


def test_a_library_that_cannot_be_found_is_no_fault(
    slot: ctypes.c_size_t, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent(name: str) -> None:
        raise LookupError(f"{name} is not loaded")

    monkeypatch.setattr(blas, "_loaded", absent)
    before = slot.value
    with caplog.at_level(logging.WARNING):
        blas.choose_blas("openblas")
    assert slot.value == before
    assert "libmlx.so is not loaded" in caplog.text
