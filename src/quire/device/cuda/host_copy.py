"""Copies of small arrays in pinned memory of the host."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from quire.core.arrays import Ints
from quire.device.cuda.extension import Extension
from quire.device.host_copy import HostCopy


class PinnedCopy(HostCopy):
    """A copy that the device writes behind the array. The host waits for this copy alone.

    Args:
        array: int32.
    """

    def __init__(self, array: mx.array, extension: Extension) -> None:
        assert array.dtype == mx.int32, "the host reads integers"
        copied, self._copy = extension.host_copy(mx.contiguous(array))
        super().__init__(copied)

    def read(self) -> Ints:
        return np.frombuffer(self._copy.read(), np.int32).reshape(self.array.shape)
