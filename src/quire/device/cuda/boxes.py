"""Maps by which Hopper's cards copy boxes of a matrix to shared memory: `copy_box`."""

from __future__ import annotations

import ctypes
from functools import cache

import mlx.core as mx
import numpy as np

from quire.device.cuda.driver import driver_call
from quire.device.gpu_kernels import in_device_memory

COLUMNS = 64
"""Columns of a box, in bfloat16: 128 bytes."""
BASE = 256
"""The lowest address of a map, a multiple of which all addresses must be."""
_MAP_BYTES, _MAP_ALIGNED = 128, 64
_BFLOAT16, _SWIZZLE_128, _PROMOTED_256 = 9, 3, 3  # CU_TENSOR_MAP_*


@cache
def memory_map(columns: int, rows: int) -> mx.array:
    """Return a map of all memory as matrices of so many columns, bfloat16, for boxes of `rows`
    rows, in device memory.

    Its dimensions are columns, rows, and two that make up a matrix's address: multiples of `BASE`
    bytes, and of 2^31 times as many. So one map serves all matrices, wherever they lie.

    Raises:
        DriverError: the driver refuses such boxes.
    """
    found = in_device_memory(mx.array(encoded(columns, rows)))
    mx.eval(found)
    return found


def reaches(address: int) -> bool:
    """Return whether a matrix lies where maps reach it."""
    return address % BASE == 0


def encoded(columns: int, rows: int) -> np.ndarray:
    """Return the bytes of `memory_map`, as words."""
    room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNED)
    place = -(-ctypes.addressof(room) // _MAP_ALIGNED) * _MAP_ALIGNED
    dimensions = (ctypes.c_uint64 * 4)(columns, 1 << 31, 1 << 31, 1 << 8)
    strides = (ctypes.c_uint64 * 3)(2 * columns, BASE, BASE << 31)
    box, steps = (ctypes.c_uint32 * 4)(COLUMNS, rows, 1, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    driver_call(
        "cuTensorMapEncodeTiled",
        *(ctypes.c_void_p(place), _BFLOAT16, 4, ctypes.c_void_p(BASE)),
        *(dimensions, strides, box, steps, 0, _SWIZZLE_128, _PROMOTED_256, 0),
    )
    return np.frombuffer(ctypes.string_at(place, _MAP_BYTES), np.uint32)
