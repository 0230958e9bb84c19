"""Where layers keep keys and values, by the kind of their blocks, and what kernels that needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
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
from quire.engine.decode import heads, kernels, token_kernels, workspace
from quire.engine.decode.coding_check import KernelRunner, tail_coding_differs, token_coding_differs
from quire.engine.decode.heads import Coding, Heads, code_parts, code_tables
from quire.engine.decode.recorder import Recorder
from quire.engine.decode.workspace import Buffer
from quire.models.stack import StackAttention


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the keys and values of a step's rows go.

    Attributes:
        blocks, offsets: addresses of where each row goes.
        coding: how they are coded for it.
        arrays: the last arguments of `Heads`.
    """

    blocks: int
    offsets: int
    coding: Coding | None
    arrays: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TailCoding:
    """How layers code their full tails.

    Attributes:
        group: whose inputs say which are full.
    """

    group: int
    kv_heads: int
    dim: int
    codes: packed.Codes


@dataclass(frozen=True, slots=True)
class LayerPool(ABC):
    """Where a layer keeps keys and values.

    Attributes:
        group: whose inputs say where a step's rows are.
        arrays: addresses of its store's arrays.
        tolerance: the most that a step's logits may be off the model's, relative to their norm.
    """

    tolerance: ClassVar[float] = 5e-2

    group: int
    block_size: int
    arrays: tuple[int, ...]

    @classmethod
    @abstractmethod
    def serves(cls, case: AttentionCase) -> bool:
        """Whether kernels are made for layers of this kind."""

    @classmethod
    def differs(cls, case: AttentionCase, runner: KernelRunner) -> str | None:
        """How what kernels code differs from what the format does; None where it does not."""
        return None

    @classmethod
    @abstractmethod
    def of(cls, store: LayerStore, group: int, address: Callable[[mx.array], int]) -> LayerPool:
        """Of a layer's store."""

    def tail_coding(self, attention: StackAttention) -> TailCoding | None:
        """How full tails are coded; None without tails."""
        return None

    def record(self, recorder: Recorder, attention: StackAttention, eps: float, last: int) -> int:
        """The last of the kernels between a layer's projections and `Buffer.ATTENDED`."""
        last = self._heads(recorder, attention, eps, last)
        tokens, dim = self.block_size, attention.head_dim
        group = attention.heads // attention.kv_heads
        shape = paged.Shape(
            mx.bfloat16, dim, dim, attention.kv_heads, group, tokens, capped=False, sinks=False
        )
        numbers = recorder.constant(score_numbers(attention.scale, None))
        return self._attend(recorder, shape, numbers, last)

    def _heads(self, recorder: Recorder, attention: StackAttention, eps: float, last: int) -> int:
        """Queries, keys and values of the rows, normalised, rotated, and where they belong."""
        at, to, rope = recorder.workspace.at, self._destination(recorder), attention.rope
        kernel = Heads(
            attention.heads,
            attention.kv_heads,
            attention.head_dim,
            self.block_size,
            rope.frequencies.size,
            rope.neighbours,
            rope.gain,
            attention.q_norm is not None,
            attention.norms_values,
            eps,
            to.coding,
        )
        arguments = [at(Buffer.ROWS), at(Buffer.Q), at(Buffer.K)]
        arguments += [at(Buffer.K if attention.v is None else Buffer.V)]
        arguments += map(recorder.optional, (attention.q_norm, attention.k_norm))
        arguments += [recorder.copied(rope.frequencies), at(Buffer.POSITIONS)]
        arguments += [to.blocks, to.offsets, *to.arrays]
        grid = kernel.grid(recorder.max_rows)
        return recorder.add(kernel.text, grid, heads.THREADS, arguments, (last,))

    @abstractmethod
    def _destination(self, recorder: Recorder) -> Destination:
        """Where the keys and values of rows go."""

    @abstractmethod
    def _attend(self, recorder: Recorder, shape: paged.Shape, numbers: int, last: int) -> int:
        """Rows attend.

        Args:
            numbers: the address of `score_numbers`.
        """


def _splits(recorder: Recorder, shape: paged.Shape) -> int:
    invariant = recorder.batch_invariant
    return workspace.splits(shape, recorder.max_rows, batch_invariant=invariant)


class PlainPool(LayerPool):
    """Blocks of keys and values as they are."""

    __slots__ = ()

    @classmethod
    def serves(cls, case: AttentionCase) -> bool:
        return kernels_serve(case)

    @classmethod
    def of(cls, store: LayerStore, group: int, address: Callable[[mx.array], int]) -> PlainPool:
        return cls(group, store.shape.block_size, tuple(map(address, store.arrays())))

    def _destination(self, recorder: Recorder) -> Destination:
        group = recorder.workspace.group(self.group)
        return Destination(group.blocks, group.offsets, None, self.arrays)

    def _attend(self, recorder: Recorder, shape: paged.Shape, numbers: int, last: int) -> int:
        at, group = recorder.workspace.at, recorder.workspace.group(self.group)
        splits = _splits(recorder, shape)
        found = at(Buffer.PARTIAL), at(Buffer.STATS)
        arguments = [at(Buffer.Q), *self.arrays, group.tiles, recorder.workspace.table, numbers]
        arguments += [*found, at(Buffer.ATTENDED)]
        grid = recorder.max_rows, shape.kv_heads * (shape.group // shape.part), splits
        shared = paged.single_memory(shape)
        source = kernels.attend(shape)
        last = recorder.add(source, grid, paged.LANES, arguments, (last,), shared)
        arguments = [at(Buffer.ROWS), *found, group.tiles, at(Buffer.ATTENDED)]
        source, grid = kernels.combine(shape, splits), (recorder.max_rows * shape.heads, 1, 1)
        return recorder.add(source, grid, paged.LANES, arguments, (last,))


@dataclass(frozen=True, slots=True)
class PagePool(LayerPool):
    """Full blocks as codes; a sequence's last block, its tail, as written.

    Attributes:
        codes: how blocks are coded.
    """

    codes: packed.Codes

    @classmethod
    def serves(cls, case: AttentionCase) -> bool:
        return kernels_serve(case)

    @classmethod
    def differs(cls, case: AttentionCase, runner: KernelRunner) -> str | None:
        return tail_coding_differs(case.spec, case.format, runner)

    @classmethod
    def of(cls, store: LayerStore, group: int, address: Callable[[mx.array], int]) -> PagePool:
        arrays = store.arrays()
        codes = packed.Codes.of(arrays)
        return cls(group, store.shape.block_size, tuple(map(address, arrays)), codes)

    def tail_coding(self, attention: StackAttention) -> TailCoding | None:
        return TailCoding(self.group, attention.kv_heads, attention.head_dim, self.codes)

    def _destination(self, recorder: Recorder) -> Destination:
        group = recorder.workspace.group(self.group)
        return Destination(group.tails, group.offsets, None, self.arrays[-2:])

    def _attend(self, recorder: Recorder, shape: paged.Shape, numbers: int, last: int) -> int:
        """Over coded blocks, and each row's own as written."""
        at, group = recorder.workspace.at, recorder.workspace.group(self.group)
        splits = _splits(recorder, shape)
        buffers = Buffer.PARTIAL, Buffer.STATS, Buffer.OWN_PARTIAL, Buffer.OWN_STATS
        found = [at(each) for each in buffers]
        arguments = [at(Buffer.Q), *self.arrays, group.coded, group.own, recorder.workspace.table]
        arguments += [group.tails, group.visible, numbers, *found]
        grid = recorder.max_rows, shape.kv_heads * (shape.group // shape.part), splits + 1
        shared = packed.shared_memory(shape, self.codes)
        source = kernels.attend_packed(shape, self.codes)
        last = recorder.add(source, grid, paged.LANES, arguments, (last,), shared)
        signs = recorder.copied(packed.signs(shape.value_dim))
        arguments = [at(Buffer.ROWS), *found, signs, at(Buffer.ATTENDED)]
        source, grid = kernels.join(shape, splits), (recorder.max_rows * shape.heads, 1, 1)
        return recorder.add(source, grid, paged.LANES, arguments, (last,))


@dataclass(frozen=True, slots=True)
class TokenPool(LayerPool):
    """Codes of single tokens: every key, a row's own too, is read as its code.

    Attributes:
        store: of the layer.
    """

    # A number at the edge between two codes may get the other one, in a token that the step itself
    # reads. 0.13 was seen, of a tiny model.
    tolerance: ClassVar[float] = 0.2

    store: TokenStore

    @classmethod
    def serves(cls, case: AttentionCase) -> bool:
        media = case.spec.attention is None
        return tokens.kernels_serve(case) and case.dtype == mx.bfloat16 and not media

    @classmethod
    def differs(cls, case: AttentionCase, runner: KernelRunner) -> str | None:
        return token_coding_differs(case, runner)

    @classmethod
    def of(cls, store: LayerStore, group: int, address: Callable[[mx.array], int]) -> TokenPool:
        assert isinstance(store, TokenStore), "the format codes single tokens"
        arrays = tuple(map(address, store.arrays()))
        return cls(group, store.shape.block_size, arrays, store)

    def _destination(self, recorder: Recorder) -> Destination:
        group, store = recorder.workspace.group(self.group), self.store
        tables = [0 if each is None else recorder.copied(each) for each in code_tables(store)]
        parts = map(recorder.optional, code_parts(store))
        return Destination(group.blocks, group.offsets, Coding.of(store), (*tables, *parts))

    def _attend(self, recorder: Recorder, shape: paged.Shape, numbers: int, last: int) -> int:
        at, group = recorder.workspace.at, recorder.workspace.group(self.group)
        splits, coded = _splits(recorder, shape), self.store.coded()
        kernel = token_kernels.attend(shape, portable.Codes.of(coded))
        found = at(Buffer.PARTIAL), at(Buffer.STATS)
        arguments = [at(Buffer.Q)]
        for *codes, last_part in (coded.keys, coded.values):
            # Biases are of the pool, levels are not.
            own = recorder.copied if coded.layout.codebook else recorder.address
            arguments += [*map(recorder.address, codes), own(last_part)]
        arguments += [group.tiles, recorder.workspace.table, numbers, *found]
        grid = recorder.max_rows, kernel.blocks, splits
        last = recorder.add(kernel.text, grid, kernel.threads, arguments, (last,), kernel.shared)
        turn = coded.layout.value_rotation
        signs = 0 if turn is None else recorder.constant(turn.map * turn.scale)
        source = token_kernels.combine(shape, splits, turned=turn is not None)
        arguments = [at(Buffer.ROWS), *found, signs, at(Buffer.ATTENDED)]
        grid = recorder.max_rows * shape.heads, 1, 1
        return recorder.add(source, grid, paged.LANES, arguments, (last,))


_KINDS: dict[str, type[LayerPool]] = {
    "plain": PlainPool,
    "page": PagePool,
    "uniform": TokenPool,
    "turbo": TokenPool,
}


def kind_of(format: KVFormat) -> type[LayerPool]:
    """Of a layer's format, see `KVFormat.of_layer`."""
    return _KINDS[format.scheme]
