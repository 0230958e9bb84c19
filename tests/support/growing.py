"""Memory whose arrays grow where they are, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quire.device.growing_memory import GrowingMemory
from tests.support.emulated_steps import memory_of


class SlicedMemory(GrowingMemory):
    """Arrays are the first rows of larger ones.

    Attributes:
        copied: number of arrays that lay elsewhere and had rows.
    """

    page_bytes = 1

    def __init__(self) -> None:
        self._whole: dict[int, mx.array] = {}
        self.copied = 0

    @property
    def ranges(self) -> int:
        """Number of arrays that have memory."""
        return len(self._whole)

    def resized(self, array: mx.array, rows: int, most_rows: int) -> mx.array:
        whole = self._whole.get(_address(array)) if array.size else None
        if whole is None or rows > len(whole):
            whole = mx.zeros((max(rows, most_rows), *array.shape[1:]), array.dtype)
            kept = min(rows, len(array))
            if kept:
                self.copied += 1
                whole[:kept] = array[:kept]
            mx.eval(whole)
            self._whole[_address(whole)] = whole
        found = whole[:rows]
        mx.eval(found)
        return found

    def keep(self, arrays: Sequence[mx.array]) -> None:
        used = {_address(each) for each in arrays if each.size}
        self._whole = {at: whole for at, whole in self._whole.items() if at in used}


def _address(array: mx.array) -> int:
    return int(memory_of(array).ctypes.data)
