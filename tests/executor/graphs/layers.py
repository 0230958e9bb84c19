"""One layer's attention as graphs record it, run in the CPU emulation on a store of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from quire.attention.backend import Scoring
from quire.attention.metadata import AttentionMetadata, build_metadata
from quire.attention.paged import packed
from quire.attention.paged.cuda import shape_of
from quire.attention.paged.portable_kernels import Codes
from quire.attention.paged.tiling import Tiling
from quire.attention.paged.warpgroups import tiling_of
from quire.attention.reference import ReferenceBackend
from quire.cache.formats.base import LayerShape, LayerStore
from quire.cache.formats.registry import make_store
from quire.cache.specs import AttentionSpec, KVLayout
from quire.core.kv_format import KVFormat
from quire.device.cuda.driver import Card
from quire.executor.graphs.attention import attention_kernels
from quire.executor.graphs.attention.layer_attention import LayerAttention
from quire.executor.graphs.attention.pool_kinds import kind_of
from quire.executor.graphs.attention.prompt_rows import PromptRows, write_prompts
from quire.executor.graphs.attention.workspaces import COMMON, Workspaces
from quire.executor.graphs.graph_cache import MAX_ROWS
from quire.executor.graphs.input_numbers import write_group
from quire.executor.graphs.layout import InputLayout, group_of, step_type
from quire.executor.graphs.places import Operand
from quire.executor.graphs.recorder import Buffer, Kernel, Recorder
from quire.executor.graphs.records import StepRecord
from tests.attention.rows import HandRows
from tests.support.emulated_card import SMALL
from tests.support.emulated_steps import EmulatedRunner, memory_of


def empty_step(rows: int = MAX_ROWS) -> StepRecord:
    """Return the inputs of a step with one KV group, all 0."""
    return np.zeros(1, step_type(rows, 1))


More = Callable[[EmulatedRunner, InputLayout], Iterator[Kernel]]


def code_tails(store: LayerStore, spec: AttentionSpec) -> More:
    """Return a function that yields the kernels which encode full tails, as `Recording` launches
    them behind all layers.
    """

    def kernels_of(runner: EmulatedRunner, inputs: InputLayout) -> Iterator[Kernel]:
        if not store.has_tail:
            return
        assert store.packed is not None
        arrays, at = store.arrays(), inputs.group(0)
        value_dim = 0 if spec.value_in_key else spec.value_dim
        stores = mx.array(np.array([runner.address(each) for each in arrays], np.int64))
        own = at.blocks, at.offsets, at.tails, runner.address(packed.signs(spec.value_dim))
        arguments = inputs.rows, *own, runner.address(stores)
        dims = spec.kv_heads, spec.head_dim, value_dim
        source = attention_kernels.code_tails(*dims, Codes.of(store.packed.coded()))
        yield Kernel(
            source, (spec.kv_heads, 1, 1), attention_kernels.TAIL_THREADS, 0, arguments, ()
        )

    return kernels_of


def attended(
    store: LayerStore,
    metadata: AttentionMetadata,
    projected: Mapping[str, mx.array],
    scale: float,
    more: More = lambda runner, inputs: iter(()),
    sinks: mx.array | None = None,
    *,
    many: bool = False,
    card: Card = SMALL,
) -> mx.array:
    """Run the kernels from a layer's products to its result, `[T, heads, value_dim]`.

    Args:
        projected: bfloat16 "q" `[T, heads, dim]`, "k" and "v" `[T, kv_heads, dim]`; "v" is not read
            where values are the starts of keys.
        more: kernels to run behind them.
        many: whether as in a graph of more than `MAX_ROWS` rows.
    """
    runner, count = EmulatedRunner(), metadata.rows
    rows = max(1 << (count - 1).bit_length(), 2 * MAX_ROWS if many else 1)
    room = rows if many else MAX_ROWS
    spec, heads = metadata.spec, projected["q"].shape[1]
    workspaces = Workspaces(KVLayout.of((spec,)), metadata.block_size, tokens=4096)
    dims = spec.head_dim, spec.value_dim, spec.kv_heads
    shape = shape_of(*dims, heads, metadata.block_size, capped=False, sinks=False)
    tilings, blocks = list[Tiling](), list[int]()
    if many:
        tilings.append(tiling_of(shape, card, value_in_key=spec.value_in_key))
        blocks += workspaces.blocks
    inputs = InputLayout(1, room, 500, runner.address, tilings=tilings, workspace=blocks)
    step = empty_step(room)
    step["rows"][0, 0] = count
    prompts = PromptRows.of(metadata) if many else None
    tiling = tilings[0] if many else None
    write_group(group_of(step, 0), metadata, 0, tiling=tiling, prompts=prompts, max_rows=rows)
    table = [metadata.block_table]
    if prompts is not None:
        entries, room_of = len(metadata.block_table), {"room": blocks[0], "max_rows": rows}
        assert write_prompts(group_of(step, 0), prompts, entries, tiling=tilings[0], **room_of)
        table.append(prompts.table)
    whole = np.concatenate([step.view(np.int32), *table])
    ctypes.memmove(inputs.numbers, whole.ctypes.data, whole.nbytes)
    recorder = Recorder(rows, runner.address, inputs, card, workspaces=workspaces)
    if many:  # numbers that no step has written must not matter
        memory = workspaces.memory(COMMON)
        ctypes.memset(runner.address(memory), 255, memory.nbytes)

    def operand(name: str) -> Operand:
        given = projected[name]
        width = given.shape[1] * given.shape[2]
        room = mx.concatenate([given, mx.zeros((rows - count, *given.shape[1:]), given.dtype)])
        buffer = Buffer(recorder.constant(room), room.nbytes)
        return Operand(buffer.address, room.dtype, width, given.shape[2], buffer)

    result = mx.zeros((rows, heads, spec.value_dim), mx.bfloat16)
    layer = LayerAttention(
        heads=heads,
        spec=spec,
        scale=scale,
        softcap=None,
        q=operand("q"),
        k=operand("k"),
        v=None if spec.value_in_key else operand("v"),
        normed=False,
        values_normed=False,
        eps=0.0,
        q_norm=None,
        k_norm=None,
        rotation=None,
        result=Buffer(recorder.constant(result), result.nbytes),
        sinks=sinks,
    )
    kind_of(store.format).of(store, 0, runner.address).record(recorder, layer)
    for kernel in (*recorder.kernels, *more(runner, inputs)):
        runner.run(kernel)
    return mx.array(memory_of(result)).view(mx.bfloat16)[:count]


class HeldLayer:
    """A layer's store that kernels write to, beside one of the reference, in blocks of 64.

    Args:
        blocks, tails: how many the stores have.
        tables: each sequence's block table.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        format: KVFormat,
        tables: Sequence[Sequence[int]],
        blocks: int,
        tails: int = 0,
    ) -> None:
        self._spec, self._format, self._tables = spec, format, tables
        shape = LayerShape.of(spec, 64, mx.bfloat16)
        self.ours, self.theirs = (make_store(shape, format) for _ in range(2))
        for store in (self.ours, self.theirs):
            store.resize(blocks, ())
            if format.has_tail:
                store.resize_tails(tails, ())

    def metadata(self, reached: Sequence[int], counts: Sequence[int]) -> AttentionMetadata:
        """Return the next rows of each sequence that has any in this step."""
        places = enumerate(zip(reached, counts, self._tables, strict=True))
        rows = [
            HandRows(start, count, self._format, (table,), (number,))
            for number, (start, count, table) in places
            if count
        ]
        return build_metadata(0, self._spec, rows, 64)

    def projected(self, rows: int, heads: int, seed: int = 0) -> dict[str, mx.array]:
        """Return random queries, keys and values of a step."""
        spec = self._spec
        shapes = (heads, spec.head_dim), (spec.kv_heads, spec.head_dim)
        shapes += ((spec.kv_heads, spec.value_dim),)
        drawn = (normal((rows, *shape), 3 * seed + n) for n, shape in enumerate(shapes))
        found = dict(zip("qkv", drawn, strict=True))
        if spec.value_in_key:
            found["v"] = found["k"][..., : spec.value_dim]
        return found

    def write(self, metadata: AttentionMetadata, projected: Mapping[str, mx.array]) -> None:
        """Write rows that later ones read."""
        for store in (self.ours, self.theirs):
            store.write(projected["k"], projected["v"], metadata.slots)
            mx.eval(store.arrays())

    def attended(
        self,
        metadata: AttentionMetadata,
        projected: Mapping[str, mx.array],
        scale: float,
        **options: Any,
    ) -> mx.array:
        """Run the kernels of a step; for options see `attended`."""
        coding = code_tails(self.ours, self._spec)
        return attended(self.ours, metadata, projected, scale, coding, **options)

    def error(
        self,
        metadata: AttentionMetadata,
        projected: Mapping[str, mx.array],
        scale: float,
        sinks: mx.array | None = None,
        **options: Any,
    ) -> float:
        """Run a step both ways; return the largest relative error of a row."""
        found = self.attended(metadata, projected, scale, sinks=sinks, **options)
        return worst_of_rows(found, self.expected(metadata, projected, scale, sinks))

    def expected(
        self,
        metadata: AttentionMetadata,
        projected: Mapping[str, mx.array],
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Run a step by the reference."""
        written = self.theirs.write(projected["k"], projected["v"], metadata.slots)
        prepared = ReferenceBackend().prepare(metadata)
        return prepared.forward(projected["q"], self.theirs, written, Scoring(scale, None, sinks))


def worst_of_rows(found: mx.array, expected: mx.array) -> float:
    """Return the largest relative error of a row `[T, heads, dim]`."""
    both = found - expected, expected
    error, whole = (mx.linalg.norm(each.astype(mx.float32), axis=(1, 2)) for each in both)
    return (error / whole).max().item()  # type: ignore[return-value]  # of one float


def normal(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(mx.bfloat16)
