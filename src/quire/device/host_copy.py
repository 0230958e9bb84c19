"""Arrays that a device computes and the host reads."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from quire.core.arrays import Ints


class HostCopy:
    """An int32 array that the device computes, and its copy on the host.

    Attributes:
        array: the array. Computing it makes the copy.
    """

    def __init__(self, array: mx.array) -> None:
        self.array = array

    def read(self) -> Ints:
        """Wait until the array is computed, and return it."""
        return np.array(self.array)
