"""One layer's attention as graphs record it, run in the CPU emulation on a store of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping

import mlx.core as mx
import numpy as np

from quire.attention.metadata import AttentionMetadata
from quire.cache.formats.base import LayerStore
from quire.executor.graphs.graph_cache import MAX_ROWS
from quire.executor.graphs.layer_attention import HeadRows, LayerAttention
from quire.executor.graphs.layout import InputLayout, group_of, step_type, write_group
from quire.executor.graphs.pool_kinds import kind_of
from quire.executor.graphs.recorder import Buffer, Kernel, Recorder
from quire.executor.graphs.records import StepRecord
from tests.device.cuda.cards import H200
from tests.support.emulated_steps import EmulatedRunner, memory_of


def empty_step() -> StepRecord:
    """Return the inputs of a step with one KV group, all 0."""
    return np.zeros(1, step_type(MAX_ROWS, 1))


def attended(
    store: LayerStore,
    metadata: AttentionMetadata,
    projected: Mapping[str, mx.array],
    scale: float,
    more: Callable[[EmulatedRunner, InputLayout], Iterator[Kernel]] = lambda r, i: iter(()),
    sinks: mx.array | None = None,
) -> mx.array:
    """Run the kernels from a layer's products to its result, `[T, heads, value_dim]`.

    Args:
        projected: bfloat16 "q" `[T, heads, dim]`, "k" and "v" `[T, kv_heads, dim]`; "v" is not read
            where values are the starts of keys.
        more: kernels to run behind them.
    """
    runner, count = EmulatedRunner(), metadata.rows
    inputs = InputLayout(1, MAX_ROWS, 100, runner.address)
    step = empty_step()
    step["rows"][0, 0] = count
    write_group(group_of(step, 0), metadata, 0)
    whole = np.concatenate([step.view(np.int32), metadata.block_table])
    ctypes.memmove(inputs.numbers, whole.ctypes.data, whole.nbytes)
    rows = 1 << (count - 1).bit_length()
    recorder = Recorder(rows, runner.address, inputs, H200)

    def operand(name: str) -> HeadRows:
        given = projected[name]
        width = given.shape[1] * given.shape[2]
        room = mx.concatenate([given, mx.zeros((rows - count, *given.shape[1:]), given.dtype)])
        return HeadRows(Buffer(recorder.constant(room), room.nbytes), 0, width, given.shape[2])

    q, k = projected["q"], projected["k"]
    spec = metadata.spec
    result = mx.zeros((rows, q.shape[1], spec.value_dim), mx.bfloat16)
    layer = LayerAttention(
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
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
        value_dim=spec.value_dim,
        value_in_key=spec.value_in_key,
    )
    kind_of(store.format).of(store, 0, runner.address).record(recorder, layer)
    for kernel in (*recorder.kernels, *more(runner, inputs)):
        runner.run(kernel)
    return mx.array(memory_of(result)).view(mx.bfloat16)[:count]
