"""Floating types by the names that settings and specs use, and arrays of the host's numbers."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from quire.core.arrays import Ints

DTYPES: dict[str, mx.Dtype] = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}


_noted: list[list[mx.array]] = []
"""Lists that take the arrays of `from_host`, innermost context last. Only the thread that owns MLX
uses it.
"""


def from_host(values: npt.NDArray[Any] | array[int]) -> mx.array:
    """Return numbers of one step as an array on the device.

    All that a step's attention and states read from the host goes through here, so that `noting`
    finds it.
    """
    found = mx.array(values)  # type: ignore[arg-type]  # it takes buffers
    if _noted:
        _noted[-1].append(found)
    return found


@contextmanager
def noting() -> Iterator[list[mx.array]]:
    """Collect the arrays that `from_host` makes within the context, in order."""
    _noted.append([])
    try:
        yield _noted[-1]
    finally:
        _noted.pop()


def int32(values: Sequence[int] | Ints) -> mx.array:
    """Return an int32 array on the device."""
    return from_host(np.asarray(values, dtype=np.int32))
