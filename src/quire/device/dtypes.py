"""Floating types by the names that settings and specs use."""

from __future__ import annotations

import mlx.core as mx

DTYPES: dict[str, mx.Dtype] = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}
