"""Fills new device memory as a GPU does: with what was there before."""

from __future__ import annotations

import ctypes
import math
from weakref import ref

import mlx.core as mx
import pytest
from greenlet import getcurrent, greenlet

from quire.cache.formats import paging
from quire.executor.graphs import device_memory
from tests.support.emulated_steps import memory_of

_NAN, _NUMBER = 0xFF, 0x5A
"""Bytes of which every float is NaN, every integer -1; and of which every float is finite and large
(1.5e16, in float16 203)."""


class NewMemory:
    """The memory that kernels write before they read it, which is filled with NaN.

    Ranks of a split model that are greenlets of one thread have memory of their own.
    """

    def __init__(self) -> None:
        self._arrays: list[tuple[greenlet, ref[mx.array]]] = []

    def unwritten(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        array = _filled(shape, dtype, _NAN)
        self._arrays.append((getcurrent(), ref(array)))
        return array

    def spoil(self) -> None:
        """Fill this rank's again, so that a step cannot read what an earlier one has written."""
        self._arrays = [each for each in self._arrays if each[1]() is not None]
        for rank, each in self._arrays:
            if rank is getcurrent() and (array := each()) is not None:
                ctypes.memset(memory_of(array).ctypes.data, _NAN, array.nbytes)


def fill_new_memory(patch: pytest.MonkeyPatch) -> NewMemory:
    """Fill what kernels write before they read it with NaN, and new blocks and states with numbers
    that nobody wrote. A result that depends on them is wrong.
    """
    memory = NewMemory()
    patch.setattr(device_memory, "unwritten", memory.unwritten)
    patch.setattr(paging, "blank", lambda shape, dtype: _filled(shape, dtype, _NUMBER))
    return memory


@pytest.fixture(autouse=True)
def new_memory(monkeypatch: pytest.MonkeyPatch) -> NewMemory:
    """Fill the new memory of a test, see `fill_new_memory`. Folders import it into their
    conftest.
    """
    return fill_new_memory(monkeypatch)


def _filled(shape: tuple[int, ...], dtype: mx.Dtype, byte: int) -> mx.array:
    size = math.prod(shape) * dtype.size
    array = mx.full((size,), byte, mx.uint8).view(dtype).reshape(shape)
    mx.eval(array)
    return array
