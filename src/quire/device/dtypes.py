"""Floating types by the names that settings and specs use, and int32 arrays."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from quire.core.arrays import Ints

DTYPES: dict[str, mx.Dtype] = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}


def int32(values: Sequence[int] | Ints) -> mx.array:
    """Return an int32 array on the device."""
    return mx.array(np.asarray(values, dtype=np.int32))
