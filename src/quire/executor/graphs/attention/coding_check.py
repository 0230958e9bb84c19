"""Checks the codes that kernels write against the KV format's own encoder."""

from __future__ import annotations

from abc import ABC, abstractmethod

import mlx.core as mx
import numpy as np

from quire.attention.backend import AttentionCase
from quire.attention.paged import packed
from quire.attention.paged.portable_kernels import Codes
from quire.cache.formats.base import LayerShape, LayerStore, vector_sizes
from quire.cache.formats.registry import make_store
from quire.cache.formats.slots import SlotMapping
from quire.cache.formats.tokens import TokenStore
from quire.cache.specs import KVSpec
from quire.core.kv_format import KVFormat
from quire.device.cuda.driver import Compiler, DriverError, Graph
from quire.device.cuda.extension import Extension
from quire.device.verified import disagreement
from quire.executor.graphs.attention import attention_kernels, heads
from quire.executor.graphs.attention.heads import Coding, Heads, code_parts, code_tables
from quire.executor.graphs.recorder import Kernel, launches

_TOLERANCE = 1e-2


class KernelRunner(ABC):
    """Interface that runs single kernels."""

    @abstractmethod
    def address(self, array: mx.array) -> int:
        """Return the device address of an evaluated array."""

    @abstractmethod
    def run(self, kernel: Kernel) -> None:
        """Run a kernel. It writes to the arrays at its addresses."""


class DeviceRunner(KernelRunner):
    """Runs each kernel as a graph of its own."""

    def __init__(self, compiler: Compiler, extension: Extension) -> None:
        self._compiler, self._extension = compiler, extension

    def address(self, array: mx.array) -> int:
        return self._extension.pointer(array)

    def run(self, kernel: Kernel) -> None:
        out = mx.zeros((1, 1))
        mx.eval(out)
        graph = Graph(launches([kernel], self._compiler.functions([kernel.source])))
        mx.eval(self._extension.replay(graph.handle, [], [], out, 1))
        mx.synchronize()


def tail_coding_differs(spec: KVSpec, format: KVFormat, runner: KernelRunner) -> str | None:
    """Return how tails coded by the kernel differ from the store's own; None if close enough."""
    shape = LayerShape.of(spec, packed.BLOCK_SIZE, mx.bfloat16)
    store, expected = _stores(shape, format)
    assert store.packed is not None, "full blocks hold codes"
    for either in (store, expected):
        either.resize_tails(2, ())
    arrays, vectors = store.arrays(), _keys_and_values(shape)
    for tails, each in zip(arrays[-len(vectors) :], vectors, strict=True):
        tails[: shape.kv_heads] = each.swapaxes(0, 1)
    values = vectors[1] if len(vectors) > 1 else vectors[0][..., : spec.value_dim]
    # Of two rows the second fills its tail, 0, which goes to block 2.
    inputs = [mx.array(each) for each in ([2], [1, 2], [5, 63], [1, 0])]
    inputs.append(packed.signs(spec.value_dim))
    dims = shape.kv_heads, shape.head_dim, 0 if spec.value_in_key else shape.value_dim
    mx.eval(*arrays, *inputs)
    table = mx.array(np.array([runner.address(each) for each in arrays], np.int64))
    mx.eval(table)
    source = attention_kernels.code_tails(*dims, Codes.of(store.packed.coded()))
    arguments = tuple(map(runner.address, (*inputs, table)))
    grid = shape.kv_heads, 1, 1
    try:
        runner.run(
            Kernel(source, grid, attention_kernels.TAIL_THREADS, shared=0, arguments=arguments)
        )
    except (DriverError, RuntimeError) as problem:
        return str(problem)
    expected.write(vectors[0], values, _slots(shape))
    return _difference(store, expected, shape)


def token_coding_differs(case: AttentionCase, runner: KernelRunner) -> str | None:
    """Return how coded tokens and rotated queries differ from the store's own.

    None if they are close enough.
    """
    shape = LayerShape.of(case.spec, case.block_size, case.dtype)
    store, expected = _stores(shape, case.format)
    assert isinstance(store, TokenStore), "the format codes single tokens"
    assert isinstance(expected, TokenStore), "the format codes single tokens"
    keys, *others = _keys_and_values(shape)
    values = others[0] if others else keys
    slots, count = _slots(shape), shape.block_size
    q = _normal((count, case.heads, shape.head_dim), 0).astype(case.dtype)
    wanted = expected.transform(q.astype(mx.float32))
    # No norms, and nothing turns with its position.
    sizes = case.heads, shape.kv_heads, shape.head_dim, shape.value_dim if others else 0, count
    head_strides = shape.head_dim, shape.head_dim, values.shape[-1]
    q_head, k_head, v_head = head_strides
    strides = case.heads * q_head, shape.kv_heads * k_head, shape.kv_heads * v_head
    kernel = Heads(
        *sizes,
        pairs=0,
        neighbours=False,
        strides=strides,
        head_strides=head_strides,
        normed=False,
        values_normed=False,
        eps=0.0,
        coding=Coding.of(store),
    )
    rows, blocks, offsets = mx.array([count]), mx.array(slots.blocks), mx.array(slots.offsets)
    inputs = [rows, q, keys, values, q, *[None] * 4, blocks, offsets]
    inputs += [*code_tables(store), *code_parts(store)]
    mx.eval(wanted, [each for each in inputs if each is not None])
    arguments = tuple(0 if each is None else runner.address(each) for each in inputs)
    grid = kernel.grid(count)
    try:
        runner.run(Kernel(kernel.text, grid, heads.THREADS, shared=0, arguments=arguments))
    except (DriverError, RuntimeError) as problem:
        return str(problem)
    expected.write(keys, values[..., : shape.value_dim], slots)
    if (difference := disagreement(q, wanted, _TOLERANCE)) is not None:
        return f"queries of coded keys: {difference}"
    return _difference(store, expected, shape)


def _stores(shape: LayerShape, format: KVFormat) -> tuple[LayerStore, LayerStore]:
    """Return two stores of three blocks each."""
    stores = make_store(shape, format), make_store(shape, format)
    for each in stores:
        each.resize(3, ())
    return stores


def _keys_and_values(shape: LayerShape) -> list[mx.array]:
    """Return random keys and values of one block, each `[block_size, kv_heads, head_dim]`."""
    vectors = [_normal((shape.block_size, shape.kv_heads, n), n) for n in vector_sizes(shape)]
    return [(3 * each + 1).astype(mx.bfloat16) for each in vectors]


def _slots(shape: LayerShape) -> SlotMapping:
    """Return the slots of block 2, in order."""
    count = shape.block_size
    blocks, offsets = np.full(count, 2, np.int32), np.arange(count, dtype=np.int32)
    starts = np.array([0, count], np.int32)
    return SlotMapping(
        blocks, offsets, starts, tails=None, kv_heads=shape.kv_heads, block_size=count
    )


def _difference(store: LayerStore, expected: LayerStore, shape: LayerShape) -> str | None:
    """Return the difference between block 2 of two stores, as attention reads it."""
    rows = mx.arange(2 * shape.kv_heads, 3 * shape.kv_heads)[:, None]
    q = _normal((shape.kv_heads, 4, shape.head_dim), 1)
    weights = _normal((shape.kv_heads, 4, shape.block_size), 2)
    for what, x in (("scores", q), ("weighted_sum", weights)):
        found, wanted = (
            getattr(each.packed.read(rows), what)(x) for each in (store, expected) if each.packed
        )
        if (difference := disagreement(found, wanted, _TOLERANCE)) is not None:
            return f"coded blocks, {what}: {difference}"
    return None


def _normal(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))
