"""Several rows of a sequence over page codes as recorded steps compute them, emulated."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
import pytest
from quire.executor.graphs.served import MOST_ROWS
from quire.executor.graphs.workspace import Buffer, Workspace, table_start
from quire.models.stack import Stack

from quire.attention.backend import Scoring
from quire.attention.metadata import AttentionMetadata, build_metadata
from quire.attention.paged import packed
from quire.attention.reference import ReferenceBackend
from quire.cache.formats.base import LayerShape, LayerStore
from quire.cache.formats.registry import make_store
from quire.cache.specs import AttentionSpec, FullKV, WindowKV
from quire.core.kv_format import KVFormat
from quire.executor.graphs import kernels
from quire.executor.graphs.pools import kind_of
from quire.executor.graphs.recorder import Kernel, Recorder
from quire.executor.graphs.runner import write_group
from tests.attention.rows import HandRows
from tests.device.cuda.cards import H200
from tests.executor.graphs.test_recording import FAMILIES, packed_model
from tests.support.emulated_metal import why_not
from tests.support.emulated_steps import EmulatedRunner

PLAIN = KVFormat()
TABLES = [(4, 0, 2), (1, 3)]
STEPS = [
    (40, 20),
    (24, 40),  # the first sequence fills its first block
    (64, 0),  # and a whole one
    (1, 4),  # the second sequence fills its first
    (11, 1),
]
"""How many rows each sequence has, step by step."""
FULL_BLOCKS = [4, 0, 1]


def rows_of(reached: Sequence[int], counts: Sequence[int], format: KVFormat) -> list[HandRows]:
    """The next rows of the sequences, of which some are computed."""
    return [
        HandRows(start, count, format, (table,), (number,))
        for number, (start, count, table) in enumerate(zip(reached, counts, TABLES, strict=True))
        if count
    ]


class Layer:
    """The first layer of a stack, on a store of its own."""

    def __init__(self, stack: Stack, spec: AttentionSpec, format: KVFormat) -> None:
        self._stack, self._spec, self._format = stack, spec, format
        self._attention = stack.layers[0].attention
        self.store = make_store(LayerShape.of(spec, 64, mx.bfloat16), format)
        self.store.resize(5, ())
        if format.has_tail:
            self.store.resize_tails(2, ())

    def metadata(self, reached: Sequence[int], counts: Sequence[int]) -> AttentionMetadata:
        return build_metadata(0, self._spec, rows_of(reached, counts, self._format), 64)

    def step(self, metadata: AttentionMetadata, projected: dict[Buffer, mx.array]) -> mx.array:
        """What rows attended to; of plain layers their queries, which are no further computed."""
        runner, count = EmulatedRunner(), metadata.rows
        workspace = Workspace(self._stack, 1, MOST_ROWS, 100, runner.address)
        numbers = np.zeros(table_start(MOST_ROWS, 1), np.int32)
        numbers[0] = count
        numbers[4:][:count] = metadata.keys.astype(np.float32).view(np.int32)
        write_group(numbers, 0, metadata, 0)
        inputs = np.concatenate([numbers, metadata.block_table])
        ctypes.memmove(workspace.at(Buffer.INPUTS), inputs.ctypes.data, inputs.nbytes)
        for buffer, each in projected.items():
            bits = np.array(each.view(mx.uint16))
            ctypes.memmove(workspace.at(buffer), bits.ctypes.data, bits.nbytes)
        recorder = Recorder(1 << (count - 1).bit_length(), runner.address, workspace, H200)
        pool = kind_of(self._format).of(self.store, 0, runner.address)
        pool.record(recorder, self._attention, self._stack.eps, 0)
        result = Buffer.ATTENDED if self._format.has_tail else Buffer.Q
        own = recorder.kernels if self._format.has_tail else recorder.kernels[:1]
        for kernel in (*own, *self._coding(runner, workspace)):
            runner.run(kernel)
        found = np.zeros(projected[Buffer.Q].shape, np.uint16)
        ctypes.memmove(found.ctypes.data, workspace.at(result), found.nbytes)
        return mx.array(found).view(mx.bfloat16)

    def _coding(self, runner: EmulatedRunner, workspace: Workspace) -> Iterator[Kernel]:
        """What codes the blocks that are full, as `Recording` launches it behind all layers."""
        if not self._format.has_tail:
            return
        arrays, at = self.store.arrays(), workspace.group(0)
        heads, dim = self._attention.kv_heads, self._attention.head_dim
        stores = mx.array(np.array([runner.address(each) for each in arrays], np.int64))
        inputs = at.blocks, at.offsets, at.tails, runner.address(packed.signs(dim))
        arguments = workspace.at(Buffer.ROWS), *inputs, runner.address(stores)
        source = kernels.code_tails(heads, dim, packed.Codes.of(arrays))
        yield Kernel(source, (heads, 1, 1), kernels.TAIL_THREADS, 0, arguments, ())


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    ("kind", "bits", "dim"),
    [
        *((FullKV, (n, n), 64) for n in (2, 3, 4, 5, 6, 8)),
        *((WindowKV, bits, 64) for bits in ((4, 8), (8, 4), (2, 5), (3, 6))),
        *((FullKV, bits, 128) for bits in ((4, 4), (8, 8), (6, 3), (5, 2))),
        *((WindowKV, bits, 256) for bits in ((4, 8), (3, 5))),
        *((FullKV, bits, 512) for bits in ((8, 4), (6, 6))),
    ],
)
def test_rows_of_one_block_see_what_the_format_says(
    kind: type, bits: tuple[int, int], dim: int
) -> None:
    """Steps of some rows against the reference, which has all rows in one."""
    stack = packed_model(FAMILIES["qwen3_moe"] | {"head_dim": dim}).stack()
    attention = stack.layers[0].attention
    heads = {Buffer.Q: attention.heads, Buffer.K: attention.kv_heads, Buffer.V: attention.kv_heads}
    more = () if kind is FullKV else (100,)
    spec = kind(attention.kv_heads, dim, *more)
    plain, coded, expected = (
        Layer(stack, spec, each) for each in (PLAIN, *[KVFormat("page", *bits)] * 2)
    )
    queries: list[list[mx.array]] = [[] for _ in TABLES]
    found: list[list[mx.array]] = [[] for _ in TABLES]
    reached = [0] * len(TABLES)
    for number, counts in enumerate(STEPS):
        projected = {
            buffer: _normal((sum(counts), own, dim), 3 * number + n)
            for n, (buffer, own) in enumerate(heads.items())
        }
        q, attended = (
            layer.step(layer.metadata(reached, counts), projected) for layer in (plain, coded)
        )
        first = 0
        for sequence, count in enumerate(counts):
            queries[sequence].append(q[first : first + count])
            found[sequence].append(attended[first : first + count])
            first, reached[sequence] = first + count, reached[sequence] + count
    metadata = expected.metadata([0] * len(TABLES), reached)
    blocks, offsets = mx.array(metadata.slots.blocks), mx.array(metadata.slots.offsets)
    keys, values = (
        mx.unflatten(array, 0, (-1, attention.kv_heads))[blocks, :, offsets]
        for array in plain.store.arrays()
    )
    written = expected.store.write(keys, values, metadata.slots)
    scoring = Scoring(attention.scale, None, None)
    prepared = ReferenceBackend().prepare(metadata)
    wanted = prepared.forward(_joined(queries), expected.store, written, scoring)
    errors = _norms(_joined(found) - wanted) / _norms(wanted)
    assert errors.max().item() < 1e-2
    assert_blocks_are_alike(coded.store, expected.store, reached)


def assert_blocks_are_alike(store: LayerStore, expected: LayerStore, lengths: list[int]) -> None:
    """Full ones as they read, and what tails hold."""
    assert store.packed is not None
    assert expected.packed is not None
    heads = store.shape.kv_heads
    rows = mx.array([block * heads + n for block in FULL_BLOCKS for n in range(heads)])[:, None]
    for own, other in zip(
        store.packed.read(rows).decoded(), expected.packed.read(rows).decoded(), strict=True
    ):
        assert mx.linalg.norm(own - other).item() < 1e-2 * mx.linalg.norm(other).item()
    for own, other in zip(store.packed.tail_arrays(), expected.packed.tail_arrays(), strict=True):
        for number, length in enumerate(lengths):
            begun = slice(number * heads, (number + 1) * heads), slice(length % 64)
            assert mx.array_equal(own[begun], other[begun])


def _joined(parts: list[list[mx.array]]) -> mx.array:
    """The rows of the sequences, one behind the other."""
    return mx.concatenate([each for of_sequence in parts for each in of_sequence])


def _norms(x: mx.array) -> mx.array:
    """Of rows `[T, heads, dim]`."""
    return mx.linalg.norm(x.astype(mx.float32), axis=(1, 2))


def _normal(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(mx.bfloat16)
