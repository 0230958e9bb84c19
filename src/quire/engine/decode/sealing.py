"""Full tails are coded by a kernel: it is held against the format's own way."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from quire.attention.paged import packed
from quire.cache.formats.base import LayerShape, LayerStore, vector_sizes
from quire.cache.formats.registry import make_store
from quire.cache.formats.slots import SlotMapping
from quire.cache.specs import KVSpec
from quire.core.kv_format import KVFormat
from quire.device.cuda.driver import Compiler, DriverError, Graph, Launch
from quire.device.cuda.extension import Extension
from quire.engine.decode import kernels

_TOLERANCE = 1e-2


Run = Callable[[str, int, list[mx.array], list[mx.array]], None]
"""Runs a kernel.

Called with its source as of `kernels.seal`, the number of thread blocks, its inputs but for the
last, and the arrays of one layer's store.
"""


def seal_differs(spec: KVSpec, format: KVFormat, run: Run) -> str | None:
    """How far coded tails are from those of the format's store; None if they are near enough."""
    shape = LayerShape.of(spec, packed.BLOCK_TOKENS, mx.bfloat16)
    store, expected = make_store(shape, format), make_store(shape, format)
    for either in (store, expected):
        either.resize(3, ())
        either.resize_tails(2, ())
    arrays = store.arrays()
    vectors = [_normal((shape.block_tokens, shape.kv_heads, n), n) for n in vector_sizes(shape)]
    vectors = [(3 * each + 1).astype(mx.bfloat16) for each in vectors]
    for tails, each in zip(arrays[-2:], vectors, strict=True):
        tails[: shape.kv_heads] = each.swapaxes(0, 1)
    # Of two rows the second fills its tail, 0, which goes to block 2.
    step = [mx.array(each) for each in ([2], [1, 2], [5, 63], [1, 0])]
    signs = packed.signs(spec.value_dim)
    mx.eval(*arrays, *step, signs)
    try:
        source = kernels.seal(shape.kv_heads, shape.head_dim, packed.Codes.of(arrays))
        run(source, shape.kv_heads, [*step, signs], arrays)
    except (DriverError, RuntimeError) as problem:
        return str(problem)
    count = shape.block_tokens
    blocks, offsets = np.full(count, 2, np.int32), np.arange(count, dtype=np.int32)
    starts = np.array([0, count], np.int32)
    slots = SlotMapping(blocks, offsets, starts, None, shape.kv_heads, count)
    expected.write(vectors[0], vectors[1], slots)
    return _difference(store, expected, shape)


def runs_on_device(compiler: Compiler, extension: Extension) -> Run:
    """As a graph."""

    def run(source: str, count: int, inputs: list[mx.array], arrays: list[mx.array]) -> None:
        table = mx.array(np.array([extension.pointer(each) for each in arrays], np.int64))
        out = mx.zeros((1, 1))
        mx.eval(table, out)
        arguments = tuple(map(extension.pointer, (*inputs, table)))
        function, grid = compiler.functions([source])[0], (count, 1, 1)
        graph = Graph([Launch(function, grid, kernels.SEAL_THREADS, 0, arguments, ())])
        mx.eval(extension.replay(graph.handle, [], [], out, 1))
        mx.synchronize()

    return run


def _difference(store: LayerStore, expected: LayerStore, shape: LayerShape) -> str | None:
    """Between block 2 of both, as attention reads it."""
    rows = mx.arange(2 * shape.kv_heads, 3 * shape.kv_heads)[:, None]
    q = _normal((shape.kv_heads, 4, shape.head_dim), 1)
    weights = _normal((shape.kv_heads, 4, shape.block_tokens), 2)
    for what, x in (("scores", q), ("weighted_sum", weights)):
        found, wanted = (
            getattr(each.packed.read(rows), what)(x).astype(mx.float32)
            for each in (store, expected)
            if each.packed
        )
        error = float(mx.linalg.norm(found - wanted) / mx.linalg.norm(wanted))
        # Written so that a NaN is too much.
        if not error <= _TOLERANCE:
            return f"coded blocks, {what}: relative error {error:.2g}"
    return None


def _normal(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))
