"""The kernels of attention for each kind of KV block, and the pool arrays that they use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import mlx.core as mx

from quire.attention.backend import AttentionCase
from quire.attention.paged import cuda as paged
from quire.attention.paged import packed, tokens
from quire.attention.paged import portable_kernels as portable
from quire.attention.paged.backend import kernels_serve
from quire.attention.paged.tiles import score_numbers
from quire.cache.formats.base import LayerStore
from quire.cache.formats.tokens import TokenStore
from quire.core.kv_format import KVFormat
from quire.executor.graphs import heads, kernels, token_kernels
from quire.executor.graphs.coding_check import (
    KernelRunner,
    tail_coding_differs,
    token_coding_differs,
)
from quire.executor.graphs.heads import Coding, Heads, code_parts, code_tables
from quire.executor.graphs.indexers import ChosenKeys
from quire.executor.graphs.layer_attention import LayerAttention
from quire.executor.graphs.layout import max_tiles
from quire.executor.graphs.recorder import Buffer, Recorder

_INVARIANT_ROWS = 8
"""Number of rows that decides how keys are split in batch-invariant graphs of any size."""


@dataclass(frozen=True, slots=True)
class Attending:
    """Arguments of the attention kernels that follow `heads.cuh`.

    Attributes:
        q: queries, in the coordinates of the stored keys.
        numbers: address of `score_numbers`.
        ending: last arguments: addresses of the result and of sinks, if there are any.
        chosen: see `LayerAttention`.
    """

    shape: paged.Shape
    q: Buffer
    numbers: int
    value_in_key: bool
    result: Buffer
    ending: tuple[int, ...]
    chosen: ChosenKeys | None


@dataclass(frozen=True, slots=True)
class Destination:
    """The device memory that the keys and values of a step's rows are written to.

    Attributes:
        blocks, offsets: addresses of each row's block id and offset.
        coding: how keys and values are coded.
        arrays: last arguments of the `Heads` kernel.
    """

    blocks: int
    offsets: int
    coding: Coding | None
    arrays: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TailCoding:
    """How layers code their full tails.

    Attributes:
        group: KV group whose inputs say which tails are full.
    """

    group: int
    kv_heads: int
    dim: int
    codes: packed.Codes


@dataclass(frozen=True, slots=True)
class LayerPool(ABC):
    """The pool arrays of one layer, and the kernels that write and read them.

    Attributes:
        group: the KV group whose inputs locate a step's rows.
        arrays: addresses of the store's arrays.
        index: address of the keys of the layer's indexer; 0 without one.
        tolerance: largest difference of a step's logits from the model's, relative to their norm.
    """

    tolerance: ClassVar[float] = 5e-2

    group: int
    block_size: int
    arrays: tuple[int, ...]
    index: int = field(default=0, kw_only=True)

    @classmethod
    @abstractmethod
    def serves(cls, case: AttentionCase) -> bool:
        """Whether kernels exist for layers of this kind."""

    @classmethod
    def differs(cls, case: AttentionCase, runner: KernelRunner) -> str | None:
        """Return how codes written by kernels differ from the format's; None if they do not."""
        return None

    @classmethod
    @abstractmethod
    def of(cls, store: LayerStore, group: int, address: Callable[[mx.array], int]) -> LayerPool:
        """Return the pool of a layer's store."""

    def tail_coding(self, kv_heads: int, dim: int) -> TailCoding | None:
        """Return how full tails are coded; None without tails."""
        return None

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
        ending = layer.result.address, *more
        in_key, result, chosen = layer.value_in_key, layer.result, layer.chosen
        self._attend(
            recorder,
            Attending(
                shape, q, numbers, value_in_key=in_key, result=result, ending=ending, chosen=chosen
            ),
        )
        recorder.release(q)

    def _heads(self, recorder: Recorder, layer: LayerAttention) -> Buffer:
        """Record the kernel that prepares queries and keys, and stores keys and values."""
        to, rotation = self._destination(recorder), layer.rotation
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
        )
        reads = list(dict.fromkeys(each.buffer for each in (layer.q, k, v)))
        angles = [] if rotation is None else [rotation.cosines, rotation.sines]
        q = recorder.buffer(2 * recorder.max_rows * layer.heads * layer.head_dim, reads)
        arguments = [recorder.inputs.rows, layer.q.address, k.address, v.address, q.address]
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
            writes=[q],
        )
        return q

    def _partial(
        self, recorder: Recorder, attending: Attending, splits: int
    ) -> tuple[Buffer, Buffer]:
        """Allocate the results of splits: sums of values, and softmax statistics."""
        shape = attending.shape
        parts = recorder.max_rows * shape.heads * splits
        partial = recorder.buffer(4 * parts * shape.value_dim, [attending.q])
        return partial, recorder.buffer(8 * parts, [attending.q])

    @abstractmethod
    def _destination(self, recorder: Recorder) -> Destination:
        """Return where the keys and values of the rows are written."""

    @abstractmethod
    def _attend(self, recorder: Recorder, attending: Attending) -> None:
        """Record the attention kernels."""


def _vectors_alike(case: AttentionCase) -> bool:
    """Whether keys and values have the same size and are stored separately."""
    return not case.spec.value_in_key and case.spec.value_dim == case.spec.head_dim


def _splits(recorder: Recorder, shape: paged.Shape) -> int:
    """Return how many thread blocks share a row's keys."""
    return shape.splits(_INVARIANT_ROWS if recorder.batch_invariant else recorder.max_rows)


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

    def _destination(self, recorder: Recorder) -> Destination:
        group = recorder.inputs.group(self.group)
        return Destination(group.blocks, group.offsets, coding=None, arrays=self.arrays)

    def _attend(self, recorder: Recorder, attending: Attending) -> None:
        shape, inputs = attending.shape, recorder.inputs
        group, splits = inputs.group(self.group), _splits(recorder, shape)
        arrays, tiles, table = self.arrays, group.tiles, inputs.table
        q, reads, chosen = attending.q, list[Buffer](), attending.chosen
        if chosen is not None:
            copies = chosen.gathered(recorder, group, q, source=arrays[0], dim=shape.key_dim)
            arrays, reads = (copies.address, copies.address), [copies, chosen.tiles]
            tiles, table = chosen.tiles.address, chosen.table(recorder)
        parts = self._partial(recorder, attending, splits) if splits > 1 else ()
        result, places = attending.result, [each.address for each in parts] or [0, 0]
        arguments = [q.address, *arrays, tiles, table]
        arguments += [attending.numbers, *places, *attending.ending]
        heads, many = shape.kv_heads * (shape.group // shape.part), bool(inputs.tile_rows)
        grid, in_key = (recorder.max_rows, heads, splits), attending.value_in_key
        shared, made = paged.single_memory(shape), chosen is not None
        source = kernels.attend(shape, ordered=many, value_in_key=in_key, tiles_are_made=made)
        recorder.add(
            source,
            grid,
            paged.LANES,
            arguments=arguments,
            reads=[q, *reads],
            writes=[*parts, result],
            shared=shared,
        )
        if parts:
            arguments = [inputs.rows, *places, tiles, *attending.ending]
            source = kernels.combine(shape, splits, tiles_are_made=made)
            grid = recorder.max_rows * shape.heads, 1, 1
            recorder.add(
                source,
                grid,
                paged.LANES,
                arguments=arguments,
                reads=[*parts, *reads],
                writes=[result],
            )
        for each in (*parts, *reads[:1]):
            recorder.release(each)
        if many:
            arguments = [attending.q.address, *self.arrays, group.wide, inputs.table]
            arguments += [group.visible, attending.numbers, *attending.ending]
            grid = max_tiles(recorder.max_rows, inputs.tile_rows[self.group]), heads, 1
            source, threads, shared = kernels.attend_many(shape, recorder.card, value_in_key=in_key)
            recorder.add(
                source,
                grid,
                threads,
                arguments=arguments,
                reads=[attending.q],
                writes=[result],
                shared=shared,
            )


@dataclass(frozen=True, slots=True)
class PagePool(LayerPool):
    """Pool of the `page` format: full blocks coded, a sequence's tail plain.

    Attributes:
        codes: how blocks are coded.
    """

    codes: packed.Codes

    @classmethod
    def serves(cls, case: AttentionCase) -> bool:
        return kernels_serve(case) and _vectors_alike(case)

    @classmethod
    def differs(cls, case: AttentionCase, runner: KernelRunner) -> str | None:
        return tail_coding_differs(case.spec, case.format, runner)

    @classmethod
    def of(cls, store: LayerStore, group: int, address: Callable[[mx.array], int]) -> PagePool:
        arrays = store.arrays()
        codes = packed.Codes.of(arrays)
        return cls(group, store.shape.block_size, tuple(map(address, arrays)), codes=codes)

    def tail_coding(self, kv_heads: int, dim: int) -> TailCoding | None:
        return TailCoding(self.group, kv_heads, dim, codes=self.codes)

    def _destination(self, recorder: Recorder) -> Destination:
        group = recorder.inputs.group(self.group)
        return Destination(group.tails, group.offsets, coding=None, arrays=self.arrays[-2:])

    def _attend(self, recorder: Recorder, attending: Attending) -> None:
        """Record attention over coded blocks and each row's plain tail."""
        shape, inputs = attending.shape, recorder.inputs
        group, splits = inputs.group(self.group), _splits(recorder, shape)
        found = [
            *self._partial(recorder, attending, splits),
            *self._partial(recorder, attending, 1),
        ]
        places = [each.address for each in found]
        arguments = [attending.q.address, *self.arrays, group.coded, group.own, inputs.table]
        arguments += [group.tails, group.visible, attending.numbers, *places]
        grid = recorder.max_rows, shape.kv_heads * (shape.group // shape.part), splits + 1
        shared, source = (
            packed.shared_memory(shape, self.codes),
            kernels.attend_packed(shape, self.codes),
        )
        recorder.add(
            source,
            grid,
            paged.LANES,
            arguments=arguments,
            reads=[attending.q],
            writes=found,
            shared=shared,
        )
        signs, result = recorder.copied(packed.signs(shape.value_dim)), attending.result
        arguments = [inputs.rows, *places, signs, *attending.ending]
        source, grid = kernels.join(shape, splits), (recorder.max_rows * shape.heads, 1, 1)
        recorder.add(source, grid, paged.LANES, arguments=arguments, reads=found, writes=[result])
        for each in found:
            recorder.release(each)


@dataclass(frozen=True, slots=True)
class TokenPool(LayerPool):
    """Pool of codes of single tokens. Every key, the row's own too, is read as codes.

    Attributes:
        store: the layer's store.
    """

    # A number at the edge between two codes may get the other one, in a token that the step itself
    # reads. 0.13 was seen, of a tiny model.
    tolerance: ClassVar[float] = 0.2

    store: TokenStore

    @classmethod
    def serves(cls, case: AttentionCase) -> bool:
        media = case.spec.attention is None
        own = case.dtype == mx.bfloat16 and not media and _vectors_alike(case)
        return own and tokens.kernels_serve(case)

    @classmethod
    def differs(cls, case: AttentionCase, runner: KernelRunner) -> str | None:
        return token_coding_differs(case, runner)

    @classmethod
    def of(cls, store: LayerStore, group: int, address: Callable[[mx.array], int]) -> TokenPool:
        assert isinstance(store, TokenStore), "the format codes single tokens"
        arrays = tuple(map(address, store.arrays()))
        return cls(group, store.shape.block_size, arrays, store=store)

    def _destination(self, recorder: Recorder) -> Destination:
        group, store = recorder.inputs.group(self.group), self.store
        tables = [0 if each is None else recorder.copied(each) for each in code_tables(store)]
        parts = (0 if each is None else recorder.address(each) for each in code_parts(store))
        return Destination(group.blocks, group.offsets, Coding.of(store), arrays=(*tables, *parts))

    def _attend(self, recorder: Recorder, attending: Attending) -> None:
        shape, inputs = attending.shape, recorder.inputs
        group, splits = inputs.group(self.group), _splits(recorder, shape)
        coded = self.store.coded()
        kernel = token_kernels.attend(shape, portable.Codes.of(coded))
        found = list(self._partial(recorder, attending, splits))
        places = [each.address for each in found]
        arguments = [attending.q.address]
        for *codes, last_part in (coded.keys, coded.values):
            # Biases are of the pool, levels are not.
            own = recorder.copied if coded.layout.codebook else recorder.address
            arguments += [*map(recorder.address, codes), own(last_part)]
        arguments += [group.tiles, inputs.table, attending.numbers, *places]
        grid = recorder.max_rows, kernel.blocks, splits
        q = [attending.q]
        recorder.add(
            kernel.text,
            grid,
            kernel.threads,
            arguments=arguments,
            reads=q,
            writes=found,
            shared=kernel.shared,
        )
        turn, result = coded.layout.value_rotation, attending.result
        signs = 0 if turn is None else recorder.constant(turn.map * turn.scale)
        source = token_kernels.combine(shape, splits, turned=turn is not None)
        arguments = [inputs.rows, *places, signs, *attending.ending]
        grid = recorder.max_rows * shape.heads, 1, 1
        recorder.add(source, grid, paged.LANES, arguments=arguments, reads=found, writes=[result])
        for each in found:
            recorder.release(each)


_KINDS: dict[str, type[LayerPool]] = {
    "plain": PlainPool,
    "page": PagePool,
    "uniform": TokenPool,
    "turbo": TokenPool,
}


def kind_of(format: KVFormat) -> type[LayerPool]:
    """Return the pool class for a layer's format; see `KVFormat.of_layer`."""
    return _KINDS[format.scheme]
