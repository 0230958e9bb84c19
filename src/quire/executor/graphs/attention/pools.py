"""The kernels of attention for a kind of KV block, and the pool arrays that they use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx

from quire.attention.backend import AttentionCase
from quire.attention.paged import cuda as paged
from quire.attention.paged.backend import kernels_serve
from quire.attention.paged.portable_kernels import Codes
from quire.attention.paged.tiles import score_numbers
from quire.cache.formats.base import LayerStore
from quire.cache.specs import KVSpec
from quire.executor.graphs.attention import heads
from quire.executor.graphs.attention.attention_recorder import AttentionRecorder, PlainRows
from quire.executor.graphs.attention.coding_check import KernelRunner
from quire.executor.graphs.attention.heads import Coding, Heads
from quire.executor.graphs.attention.layer_attention import LayerAttention
from quire.executor.graphs.attention.workspaces import COMMON
from quire.executor.graphs.places import buffers_of
from quire.executor.graphs.recorder import Buffer, Recorder


@dataclass(frozen=True, slots=True)
class Destination:
    """The device memory that the keys and values of a step's rows are written to.

    Attributes:
        blocks, offsets: addresses of each row's block id and offset.
        coding: how keys and values are coded.
        arrays: last arguments of the `Heads` kernel.
        workspace: the buffer that some rows are written to, whose arrays are the last two of
            `arrays`.
    """

    blocks: int
    offsets: int
    coding: Coding | None
    arrays: tuple[int, ...]
    workspace: Buffer | None = None


@dataclass(frozen=True, slots=True)
class TailCoding:
    """How layers code their full tails.

    Attributes:
        group: KV group whose inputs say which tails are full.
        value_dim: 0 if values are the starts of keys.
    """

    group: int
    kv_heads: int
    key_dim: int
    value_dim: int
    codes: Codes


@dataclass(frozen=True, slots=True)
class LayerPool(ABC):
    """The pool arrays of one layer, and the kernels that write and read them.

    Attributes:
        group: the KV group whose inputs locate a step's rows.
        arrays: addresses of the store's arrays.
        index: address of the keys of the layer's indexer; 0 without one.
        workspace: number of the workspace for the layer's decoded blocks, see `Workspaces`.
    """

    group: int
    block_size: int
    arrays: tuple[int, ...]
    index: int = field(default=0, kw_only=True)
    workspace: int = field(default=COMMON, kw_only=True)

    @classmethod
    @abstractmethod
    def serves(cls, case: AttentionCase) -> bool:
        """Whether kernels exist for layers of this kind."""

    @classmethod
    def reads_prompts(cls, case: AttentionCase) -> bool:
        """Whether kernels exist for many rows of a sequence, over layers of a kind that is
        served.
        """
        return True

    @classmethod
    def differs(cls, case: AttentionCase, runner: KernelRunner) -> str | None:
        """Return how codes written by kernels differ from the format's; None if they do not."""
        return None

    @classmethod
    @abstractmethod
    def of(cls, store: LayerStore, group: int, address: Callable[[mx.array], int]) -> LayerPool:
        """Return the pool of a layer's store."""

    def tail_coding(self, spec: KVSpec) -> TailCoding | None:
        """Return how full tails are coded; None without tails."""
        return None

    def writes_digits(self, value_dim: int) -> bool:
        """Return whether the kernels can also write the digits of their result."""
        return False

    def record(self, recorder: Recorder, layer: LayerAttention) -> None:
        """Record the kernels from a layer's products to its attention output."""
        spec, capped, sinks = layer.spec, layer.softcap is not None, layer.sinks is not None
        shape = paged.shape_of(
            spec.head_dim,
            spec.value_dim,
            kv_heads=spec.kv_heads,
            heads=layer.heads,
            block_size=self.block_size,
            capped=capped,
            sinks=sinks,
        )
        numbers = recorder.constant(score_numbers(layer.scale, layer.softcap))
        q = layer.prepared or self._heads(recorder, layer)
        more = () if layer.sinks is None else (recorder.weight(layer.sinks),)
        ending = layer.result.address, *more, *[layer.digits] * bool(layer.digits)
        self._attend(
            AttentionRecorder(
                recorder, self.group, layer, shape=shape, q=q, numbers=numbers, ending=ending
            )
        )
        if layer.prepared is None:
            recorder.release(q)

    def _heads(self, recorder: Recorder, layer: LayerAttention) -> Buffer:
        """Record the kernel that prepares queries and keys, and stores keys and values."""
        to, rotation, spec = self._destination(recorder, layer), layer.rotation, layer.spec
        k, v = (each or layer.q for each in (layer.k, layer.v))
        kernel = Heads(
            layer.heads,
            0 if layer.k is None else spec.kv_heads,
            spec.head_dim,
            value_dim=0 if spec.value_in_key else spec.value_dim,
            block_size=self.block_size,
            pairs=0 if rotation is None else rotation.pairs,
            neighbours=rotation is not None and rotation.neighbours,
            strides=(layer.q.row, k.row, v.row),
            head_strides=(layer.q.head, k.head, v.head),
            normed=layer.normed,
            values_normed=layer.values_normed,
            eps=layer.eps,
            coding=to.coding,
            workspace=to.workspace is not None,
        )
        reads = buffers_of((layer.q, k, v))
        angles = [] if rotation is None else [rotation.cosines, rotation.sines]
        q = recorder.buffer(2 * recorder.max_rows * layer.heads * spec.head_dim, reads)
        arguments = [recorder.rows, layer.q.address, k.address, v.address, q.address]
        arguments += map(recorder.optional, (layer.q_norm, layer.k_norm))
        arguments += [each.address for each in angles] or [0, 0]
        arguments += [to.blocks, to.offsets, *to.arrays]
        grid = kernel.grid(recorder.max_rows)
        recorder.add(
            kernel.text,
            grid,
            heads.THREADS,
            arguments=arguments,
            reads=[*reads, *angles],
            writes=[q] if to.workspace is None else [q, to.workspace],
        )
        return q

    def plain_slots(self, recorder: Recorder) -> tuple[int, ...] | None:
        """Return the addresses of each row's block and offset, and of keys and values, if the pool
        stores them as they are; else None.
        """
        return None

    @abstractmethod
    def _destination(self, recorder: Recorder, layer: LayerAttention) -> Destination:
        """Return where the keys and values of the rows are written."""

    @abstractmethod
    def _attend(self, attention: AttentionRecorder) -> None:
        """Record the attention kernels."""


class PlainPool(LayerPool):
    """Pool of plain, uncoded blocks."""

    __slots__ = ()

    @classmethod
    def serves(cls, case: AttentionCase) -> bool:
        if case.spec.value_in_key:
            own = not case.format.dtype and case.dtype == mx.bfloat16
            dims = case.spec.head_dim, case.spec.value_dim
            return own and paged.takes(*dims) and case.block_size % 32 == 0
        return kernels_serve(case)

    @classmethod
    def of(cls, store: LayerStore, group: int, address: Callable[[mx.array], int]) -> PlainPool:
        arrays = tuple(map(address, store.arrays()))
        return cls(group, store.shape.block_size, arrays if len(arrays) > 1 else 2 * arrays)

    def writes_digits(self, value_dim: int) -> bool:
        return value_dim % 64 == 0

    def plain_slots(self, recorder: Recorder) -> tuple[int, ...] | None:
        group = recorder.inputs.group(self.group)
        return group.blocks, group.offsets, *self.arrays

    def _destination(self, recorder: Recorder, layer: LayerAttention) -> Destination:
        group = recorder.inputs.group(self.group)
        return Destination(group.blocks, group.offsets, coding=None, arrays=self.arrays)

    def _attend(self, attention: AttentionRecorder) -> None:
        chosen, group = attention.layer.chosen, attention.inputs
        if chosen is not None:
            copy = chosen.copying(attention.shape.key_dim)
            attention.attend_chosen(chosen, copy, self.arrays[:1])
            return
        attention.attend_rows(PlainRows(self.arrays, group.tiles, attention.table))
        if attention.has_tiles:
            attention.attend_tiles(self.arrays, tiles=group.wide)
