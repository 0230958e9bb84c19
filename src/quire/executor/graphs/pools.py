"""The kernels of attention for a kind of KV block, and the pool arrays that they use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import mlx.core as mx

from quire.attention.backend import AttentionCase
from quire.attention.paged import cuda as paged
from quire.attention.paged import packed
from quire.attention.paged.backend import kernels_serve
from quire.attention.paged.tiles import score_numbers
from quire.cache.formats.base import LayerStore
from quire.cache.specs import KVSpec
from quire.executor.graphs import heads, kernels
from quire.executor.graphs.coding_check import KernelRunner
from quire.executor.graphs.heads import Coding, Heads
from quire.executor.graphs.indexers import ChosenKeys
from quire.executor.graphs.layer_attention import LayerAttention
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.workspaces import COMMON

_INVARIANT_ROWS = 8
"""Number of rows that decides how keys are split in batch-invariant graphs of any size."""
_MOSTLY_PROMPTS = 1024
"""Fewest rows of a graph most of whose rows are those of prompts, not single ones."""


@dataclass(frozen=True, slots=True)
class Attending:
    """Arguments of the attention kernels that follow `heads.cuh`.

    Attributes:
        q: queries, in the coordinates of the stored keys.
        numbers: address of `score_numbers`.
        ending: last arguments: addresses of the result, of sinks if there are any, and of the
            result's digits if they are wanted.
    """

    layer: LayerAttention
    shape: paged.Shape
    q: Buffer
    numbers: int
    ending: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlainRows:
    """The plain keys and values of a step's rows.

    Attributes:
        arrays, tiles, table: addresses of keys and values, of a tile for each row, and of the block
            table.
        written: buffers among these that earlier kernels of the step write.
    """

    arrays: tuple[int, ...]
    tiles: int
    table: int
    written: tuple[Buffer, ...] = ()


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
    codes: packed.Codes


@dataclass(frozen=True, slots=True)
class LayerPool(ABC):
    """The pool arrays of one layer, and the kernels that write and read them.

    Attributes:
        group: the KV group whose inputs locate a step's rows.
        arrays: addresses of the store's arrays.
        index: address of the keys of the layer's indexer; 0 without one.
        workspace: number of the workspace for the layer's decoded blocks, see `Workspaces`.
        tolerance: largest error of a step's result, see `agreement.whole_error`.
    """

    tolerance: ClassVar[float] = 5e-2

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
        capped, sinks = layer.softcap is not None, layer.sinks is not None
        dims = layer.head_dim, layer.value_dim or layer.head_dim
        shape = paged.shape_of(
            *dims,
            kv_heads=layer.kv_heads,
            heads=layer.heads,
            block_size=self.block_size,
            capped=capped,
            sinks=sinks,
        )
        numbers = recorder.constant(score_numbers(layer.scale, layer.softcap))
        q = self._heads(recorder, layer)
        more = () if layer.sinks is None else (recorder.weight(layer.sinks),)
        ending = layer.result.address, *more, *[layer.digits] * bool(layer.digits)
        self._attend(recorder, Attending(layer, shape, q, numbers=numbers, ending=ending))
        recorder.release(q)

    def _heads(self, recorder: Recorder, layer: LayerAttention) -> Buffer:
        """Record the kernel that prepares queries and keys, and stores keys and values."""
        to, rotation = self._destination(recorder, layer), layer.rotation
        k, v = (each or layer.q for each in (layer.k, layer.v))
        kernel = Heads(
            layer.heads,
            0 if layer.k is None else layer.kv_heads,
            layer.head_dim,
            value_dim=0 if layer.value_in_key else layer.value_dim or layer.head_dim,
            block_size=self.block_size,
            pairs=0 if rotation is None else rotation.pairs,
            neighbours=rotation is not None and rotation.neighbours,
            strides=(layer.q.stride, k.stride, v.stride),
            head_strides=(layer.q.head_stride, k.head_stride, v.head_stride),
            normed=layer.normed,
            values_normed=layer.values_normed,
            eps=layer.eps,
            coding=to.coding,
            workspace=to.workspace is not None,
        )
        reads = list(dict.fromkeys(each.buffer for each in (layer.q, k, v)))
        angles = [] if rotation is None else [rotation.cosines, rotation.sines]
        q = recorder.buffer(2 * recorder.max_rows * layer.heads * layer.head_dim, reads)
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

    def _partial(
        self,
        recorder: Recorder,
        attending: Attending,
        shape: paged.Shape,
        splits: int,
        rows: int | None = None,
    ) -> tuple[Buffer, Buffer]:
        """Allocate the results of splits: sums of values, and softmax statistics.

        Args:
            rows: the first rows, which alone are split; None for all.
        """
        parts = (rows or recorder.max_rows) * shape.heads * splits
        partial = recorder.buffer(4 * parts * shape.value_dim, [attending.q])
        return partial, recorder.buffer(8 * parts, [attending.q])

    def _attend_chosen(
        self, recorder: Recorder, attending: Attending, chosen: ChosenKeys, copies: Buffer
    ) -> None:
        """Record the kernels that attend to copies of chosen keys. Release the copies."""
        arrays, table = (copies.address, copies.address), chosen.table(recorder)
        rows = PlainRows(arrays, chosen.tiles.address, table, written=(copies, chosen.tiles))
        self._attend_rows(recorder, attending, rows)
        recorder.release(copies)

    def _attend_rows(self, recorder: Recorder, attending: Attending, rows: PlainRows) -> None:
        """Record the kernels that attend to plain keys, one row a tile."""
        shape, inputs, q = attending.shape, recorder.inputs, attending.q
        splits, made = splits_of(recorder, shape), bool(rows.written)
        digit_rows = recorder.max_rows if attending.layer.digits else 0
        parts = self._partial(recorder, attending, shape, splits=splits) if splits > 1 else ()
        places = [each.address for each in parts] or [0, 0]
        arguments = [q.address, *rows.arrays, rows.tiles, rows.table]
        arguments += [attending.numbers, *places, *attending.ending]
        few = bool(inputs.tilings) and recorder.max_rows >= _MOSTLY_PROMPTS
        source = kernels.attend(
            shape,
            ordered=bool(inputs.tilings),
            most_tiles=inputs.max_rows if few else 0,
            value_in_key=attending.layer.value_in_key,
            tiles_are_made=made,
            digit_rows=digit_rows,
        )
        blocks = min(recorder.max_rows, shape.tiles_at_once) if few else recorder.max_rows
        recorder.add(
            source,
            (blocks, shape.blocks, splits),
            paged.LANES,
            arguments=arguments,
            reads=[q, *rows.written],
            writes=[*parts, attending.layer.result],
            shared=paged.single_memory(shape),
        )
        if parts:
            self._add_up(
                recorder,
                attending,
                parts,
                source=kernels.combine(shape, splits, tiles_are_made=made, digit_rows=digit_rows),
                given=[rows.tiles],
                after=rows.written,
            )

    def _attend_tiles(
        self,
        recorder: Recorder,
        attending: Attending,
        arrays: Sequence[int],
        tiles: int,
        after: Sequence[Buffer] = (),
    ) -> None:
        """Record the kernel that attends to plain keys, several rows of a sequence a tile.

        Args:
            arrays: addresses of keys and values.
            tiles: address of the tiles.
            after: further buffers that it reads.
        """
        shape, inputs = attending.shape, recorder.inputs
        arguments = [attending.q.address, *arrays, tiles, inputs.table]
        arguments += [inputs.group(self.group).visible, attending.numbers, *attending.ending]
        tiling = inputs.tilings[self.group]
        kernel = kernels.attend_many(
            shape, recorder.card, value_in_key=attending.layer.value_in_key
        )
        sums = list[Buffer]()
        if kernel.piece:
            count = max(1, shape.blocks * tiling.most_shared)
            sums.append(recorder.buffer(kernel.piece * count, [attending.q]))
            arguments += [sums[0].address, recorder.constant(mx.zeros((count,), mx.int32))]
        most = max(tiling.most_tiles(recorder.max_rows), tiling.most_shared)
        recorder.add(
            kernel.source,
            (most, shape.blocks, 1),
            kernel.threads,
            arguments=arguments,
            reads=[attending.q, *after],
            writes=[attending.layer.result, *sums],
            shared=kernel.shared,
        )
        for each in sums:
            recorder.release(each)

    @staticmethod
    def _add_up(
        recorder: Recorder,
        attending: Attending,
        parts: Sequence[Buffer],
        *,
        source: str,
        given: Sequence[int],
        after: Sequence[Buffer] = (),
        rows: int | None = None,
    ) -> None:
        """Record the kernel that adds up the results of splits. Release these.

        Args:
            parts, rows: see `_partial`.
            given: the kernel's arguments between the parts and the end.
            after: further buffers that it reads.
        """
        recorder.add(
            source,
            ((rows or recorder.max_rows) * attending.shape.heads, 1, 1),
            paged.LANES,
            arguments=[
                recorder.rows,
                *(each.address for each in parts),
                *given,
                *attending.ending,
            ],
            reads=[*parts, *after],
            writes=[attending.layer.result],
        )
        for each in parts:
            recorder.release(each)

    @abstractmethod
    def _destination(self, recorder: Recorder, layer: LayerAttention) -> Destination:
        """Return where the keys and values of the rows are written."""

    @abstractmethod
    def _attend(self, recorder: Recorder, attending: Attending) -> None:
        """Record the attention kernels."""


def splits_of(recorder: Recorder, shape: paged.Shape, rows: int | None = None) -> int:
    """Return how many thread blocks share a row's keys.

    Args:
        rows: the most rows that are split; None for all.
    """
    return shape.splits(_INVARIANT_ROWS if recorder.batch_invariant else rows or recorder.max_rows)


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

    def _destination(self, recorder: Recorder, layer: LayerAttention) -> Destination:
        group = recorder.inputs.group(self.group)
        return Destination(group.blocks, group.offsets, coding=None, arrays=self.arrays)

    def _attend(self, recorder: Recorder, attending: Attending) -> None:
        shape, inputs, chosen = attending.shape, recorder.inputs, attending.layer.chosen
        group = inputs.group(self.group)
        if chosen is not None:
            copies = chosen.gathered(
                recorder, group, attending.q, source=self.arrays[0], dim=shape.key_dim
            )
            self._attend_chosen(recorder, attending, chosen, copies=copies)
            return
        rows = PlainRows(self.arrays, group.tiles, inputs.table)
        self._attend_rows(recorder, attending, rows)
        if inputs.tilings:
            self._attend_tiles(recorder, attending, self.arrays, tiles=group.wide)
