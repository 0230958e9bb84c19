"""Finds the instructions of segments whose bits differ from the model's code on this machine."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from quire.device.device import current_device
from quire.executor.segments.builder import BINARY, UNARY
from quire.program.primitives import ELEMENTWISE


def refused_nodes(ops: Any) -> frozenset[str]:
    """Return the kinds of nodes whose instructions have other bits than MLX's."""
    return _inexact(ops) | (frozenset() if _embeds_exactly(ops) else {"embed"})


@cache
def _inexact(ops: Any) -> frozenset[str]:
    """Return the element-wise primitives whose instructions have other bits than MLX's."""
    x = mx.concatenate([mx.sin(mx.arange(96.0)) * 8, mx.arange(96.0) - 20])
    found = set()
    for name in UNARY | BINARY:
        segment = ops.Segment()
        given, out = segment.given(1), segment.value(1)
        y = x[::-1]
        if name in UNARY:
            segment.unary(name, given, out)
        else:
            segment.binary(name, given, [1], segment.given(1), [1], out, [1])
        segment.output(out, [])
        segment.finish()
        (made,) = segment.run([x] if name in UNARY else [x, y])
        if name == "Rsqrt":
            expected = mx.rsqrt(x)
        elif name == "Tanh":
            expected = current_device().operations.tanh(x)
        else:
            inputs = [x] if name in UNARY else [x, y]
            expected = ELEMENTWISE[name](inputs, (False,), x.shape)
        if not mx.array_equal(made, expected, equal_nan=True).item():
            found.add(name)
    return frozenset(found)


@cache
def _embeds_exactly(ops: Any) -> bool:
    """Return whether rows of packed tables have the bits of MLX's."""
    table = mx.sin(mx.arange(16.0 * 128)).reshape(16, 128)
    codes = mx.quantize(table, group_size=64, bits=4)
    segment = ops.Segment()
    given, out = segment.given(1, integers=True), segment.value(128)
    segment.embed(given, ops.Matrix(*codes, group_size=64, bits=4), out)
    segment.output(out, [128])
    segment.finish()
    (rows,) = segment.run([mx.arange(16, dtype=mx.int32)])
    return bool(mx.array_equal(rows, mx.dequantize(*codes, group_size=64, bits=4)))
