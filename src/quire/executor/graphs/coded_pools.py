"""Pools of coded KV blocks: the page format, and codes of single tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import mlx.core as mx

from quire.attention.backend import AttentionCase
from quire.attention.paged import cuda as paged
from quire.attention.paged import packed, tokens
from quire.attention.paged import portable_kernels as portable
from quire.cache.formats.base import LayerStore
from quire.cache.formats.codecs import padded
from quire.cache.formats.tokens import TokenStore
from quire.cache.specs import KVSpec
from quire.executor.graphs import coded_kernels, kernels, token_kernels
from quire.executor.graphs.coding_check import (
    KernelRunner,
    tail_coding_differs,
    token_coding_differs,
)
from quire.executor.graphs.heads import Coding, code_parts, code_tables
from quire.executor.graphs.indexers import CodedKeys
from quire.executor.graphs.layer_attention import LayerAttention
from quire.executor.graphs.pools import Attending, Destination, LayerPool, TailCoding, splits_of
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.workspaces import STREAMS

_DECODING_BLOCKS = 1056
"""Thread blocks that decode, or code, the blocks of a workspace: eight for each multiprocessor."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A layer's decoded blocks.

    Attributes:
        arrays: addresses of keys `[blocks, kv_heads, block_size, key_dim]` and of values.
    """

    buffer: Buffer
    arrays: tuple[int, int]


@dataclass(frozen=True, slots=True)
class CodedPool(LayerPool):
    """Pool of coded blocks. In steps of many rows the last ones read decoded blocks."""

    def _workspace(
        self, recorder: Recorder, kv_heads: int, key_dim: int, *, in_key: bool
    ) -> Workspace:
        """Return the memory of the layer's decoded blocks.

        Args:
            in_key: whether values are the starts of keys.
        """
        buffer = recorder.workspace(self.workspace)
        blocks = recorder.inputs.workspace[self.group]
        keys = 2 * blocks * kv_heads * self.block_size * key_dim
        return Workspace(buffer, (buffer.address, buffer.address + (0 if in_key else keys)))

    def _decode(
        self,
        recorder: Recorder,
        attending: Attending,
        codes: portable.Codes,
        arrays: Sequence[int],
    ) -> Workspace:
        """Record the kernel that decodes the blocks which prompts read.

        Args:
            arrays: the arguments of `coded_kernels.decode_prompts` from the arrays of keys to the
                signs.
        """
        shape, in_key = attending.shape, attending.layer.value_in_key
        to = self._workspace(recorder, shape.kv_heads, shape.key_dim, in_key=in_key)
        if attending.layer.k is not None:
            inputs, halves = recorder.inputs, 1 if in_key else 2
            arguments = [inputs.group(self.group).decoded, inputs.table, *arrays, *to.arrays]
            recorder.add(
                coded_kernels.decode_prompts(shape, codes, in_key=in_key),
                (_DECODING_BLOCKS // (shape.kv_heads * halves) or 1, shape.kv_heads, halves),
                coded_kernels.DECODING_THREADS,
                arguments=arguments,
                reads=[attending.q, to.buffer],
                writes=[to.buffer],
            )
        return to

    def _attend_prompts(
        self, recorder: Recorder, attending: Attending, workspace: Workspace
    ) -> None:
        """Record the kernel by which prompts read decoded blocks."""
        tiles = recorder.inputs.group(self.group).prompts
        self._attend_tiles(
            recorder, attending, workspace.arrays, tiles=tiles, after=[workspace.buffer]
        )


def streams(recorder: Recorder) -> int:
    """Return the most rows of a step that read codes."""
    return min(recorder.max_rows, STREAMS)


@dataclass(frozen=True, slots=True)
class PagePool(CodedPool):
    """Pool of the `page` format: full blocks coded, a sequence's tail plain.

    Attributes:
        codes: how blocks are coded.
    """

    codes: packed.Codes

    @classmethod
    def serves(cls, case: AttentionCase) -> bool:
        spec = case.spec
        known = case.format.scheme == "page" and case.block_size == packed.BLOCK_SIZE
        known = known and case.dtype == mx.bfloat16 and spec.attention is not None
        return known and coded_kernels.takes(spec.head_dim, spec.value_dim)

    @classmethod
    def differs(cls, case: AttentionCase, runner: KernelRunner) -> str | None:
        return tail_coding_differs(case.spec, case.format, runner)

    @classmethod
    def of(cls, store: LayerStore, group: int, address: Callable[[mx.array], int]) -> PagePool:
        arrays = store.arrays()
        codes = packed.Codes.of(arrays)
        return cls(group, store.shape.block_size, tuple(map(address, arrays)), codes=codes)

    def tail_coding(self, spec: KVSpec) -> TailCoding | None:
        value_dim = 0 if spec.value_in_key else spec.value_dim
        return TailCoding(
            self.group, spec.kv_heads, spec.head_dim, value_dim=value_dim, codes=self.codes
        )

    def _destination(self, recorder: Recorder, layer: LayerAttention) -> Destination:
        group, tails = recorder.inputs.group(self.group), self.arrays[-1:]
        if not layer.value_in_key:
            tails = self.arrays[-2:]
        tails = (*tails, *tails)[:2]
        if layer.k is None or not recorder.inputs.tilings:
            return Destination(group.tails, group.offsets, coding=None, arrays=tails)
        in_key = layer.value_in_key
        to = self._workspace(recorder, layer.kv_heads, layer.head_dim, in_key=in_key)
        arrays = *tails, *to.arrays
        return Destination(
            group.tails, group.offsets, coding=None, arrays=arrays, workspace=to.buffer
        )

    def _attend(self, recorder: Recorder, attending: Attending) -> None:
        """Record attention over coded blocks and each row's plain tail."""
        shape, inputs, chosen = attending.shape, recorder.inputs, attending.layer.chosen
        group, rows, some = inputs.group(self.group), streams(recorder), bool(inputs.tilings)
        splits = splits_of(recorder, shape, rows)
        arrays, in_key = self.arrays, attending.layer.value_in_key
        if in_key:
            arrays = (*2 * arrays[:3], *2 * arrays[3:])
        if chosen is not None:
            more = group.coded, group.tails, arrays[6]
            keys = CodedKeys(self.codes.by_channel, arrays[:3], more)
            copies = chosen.decoded(recorder, group, attending.q, keys=keys, dim=shape.key_dim)
            self._attend_chosen(recorder, attending, chosen, copies=copies)
            return
        found = [
            *self._partial(recorder, attending, shape, splits=splits, rows=rows),
            *self._partial(recorder, attending, shape, splits=1, rows=rows),
        ]
        places = [each.address for each in found]
        arguments = [attending.q.address, *arrays, group.coded, group.own, inputs.table]
        arguments += [group.tails, group.visible, attending.numbers, *places]
        grid = rows, shape.blocks, splits + 1
        if in_key or shape.value_dim not in paged.VALUE_DIMS:
            size = shape.key_dim if in_key else shape.value_dim
            kernel = coded_kernels.attend(shape, self.codes.by_channel, size, in_key=in_key)
            source, shared = kernel.text, kernel.shared
        else:
            source = kernels.attend_packed(shape, self.codes)
            shared = packed.shared_memory(shape, self.codes)
        recorder.add(
            source,
            grid,
            paged.LANES,
            arguments=arguments,
            reads=[attending.q],
            writes=found,
            shared=shared,
        )
        signs = 0 if in_key else recorder.copied(packed.signs(shape.value_dim))
        join = kernels.join(shape, splits, turned=not in_key, some=some)
        given = [signs, group.own] if some else [signs]
        self._add_up(recorder, attending, found, source=join, given=given, rows=rows)
        if some:
            self._read_prompts(recorder, attending, arrays)

    def _read_prompts(
        self, recorder: Recorder, attending: Attending, arrays: tuple[int, ...]
    ) -> None:
        """Record the kernels by which prompts code the blocks that they fill, and attend.

        Args:
            arrays: codes, scales and biases of keys and of values, then both tails.
        """
        shape, in_key, inputs = attending.shape, attending.layer.value_in_key, recorder.inputs
        group, dim = inputs.group(self.group), shape.value_dim
        to = self._workspace(recorder, shape.kv_heads, shape.key_dim, in_key=in_key)
        if attending.layer.k is not None:
            own = self.arrays if in_key else arrays
            signs = 0 if in_key else recorder.copied(packed.signs(dim))
            halves = to.arrays[:1] if in_key else to.arrays
            recorder.add(
                kernels.code_written(
                    shape.kv_heads, shape.key_dim, 0 if in_key else dim, codes=self.codes
                ),
                (_DECODING_BLOCKS // shape.kv_heads or 1, shape.kv_heads, 1),
                kernels.TAIL_THREADS,
                arguments=[group.decoded, group.written, signs, *own, *halves],
                reads=[attending.q, to.buffer],
                writes=[to.buffer],
            )
        scaled = 0 if in_key else recorder.constant(packed.signs(dim) * dim**-0.5)
        self._decode(recorder, attending, self.codes.by_channel, arrays=[*arrays, scaled])
        self._attend_prompts(recorder, attending, to)


@dataclass(frozen=True, slots=True)
class TokenPool(CodedPool):
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
        spec = case.spec
        known = case.format.scheme in ("uniform", "turbo") and case.dtype == mx.bfloat16
        known = known and spec.attention is not None and case.block_size % tokens.KEYS == 0
        dims = spec.head_dim, spec.value_dim
        return known and dims == tuple(map(padded, dims)) and coded_kernels.takes(*dims)

    @classmethod
    def reads_prompts(cls, case: AttentionCase) -> bool:
        # The queries are turned as coded keys are: values within such keys would be, too.
        return not case.spec.value_in_key or case.format.scheme != "turbo"

    @classmethod
    def differs(cls, case: AttentionCase, runner: KernelRunner) -> str | None:
        return token_coding_differs(case, runner)

    @classmethod
    def of(cls, store: LayerStore, group: int, address: Callable[[mx.array], int]) -> TokenPool:
        assert isinstance(store, TokenStore), "the format codes single tokens"
        arrays = tuple(map(address, store.arrays()))
        return cls(group, store.shape.block_size, arrays, store=store)

    def _destination(self, recorder: Recorder, layer: LayerAttention) -> Destination:
        group, store = recorder.inputs.group(self.group), self.store
        tables = [0 if each is None else recorder.copied(each) for each in code_tables(store)]
        parts = (0 if each is None else recorder.address(each) for each in code_parts(store))
        coding = Coding.of(store, queries=layer.chosen is None)
        return Destination(group.blocks, group.offsets, coding, arrays=(*tables, *parts))

    def _attend(self, recorder: Recorder, attending: Attending) -> None:
        shape, inputs, chosen = attending.shape, recorder.inputs, attending.layer.chosen
        coded = self.store.coded()
        codes, turn = portable.Codes.of(coded), coded.layout.value_rotation
        arguments = list[int]()
        for *parts, last_part in (coded.keys, coded.values):
            # Biases are of the pool, levels are not.
            own = recorder.copied if codes.codebook else recorder.address
            arguments += [*map(recorder.address, parts), own(last_part)]
        signs = 0 if turn is None else recorder.constant(turn.signs * turn.transform_scale)
        group, in_key = inputs.group(self.group), attending.layer.value_in_key
        if chosen is not None:
            keys = CodedKeys(codes, tuple(arguments[:3]), (signs,), turned=turn is not None)
            copies = chosen.decoded(recorder, group, attending.q, keys=keys, dim=shape.key_dim)
            self._attend_chosen(recorder, attending, chosen, copies=copies)
            return
        rows, some = streams(recorder), bool(inputs.tilings)
        value_dim, size = shape.value_dim, portable.coded_value_size(coded)
        if turn is not None:  # all of a rotated sum is needed to turn it back
            shape = replace(shape, value_dim=size)
        splits = splits_of(recorder, shape, rows)
        alike = shape.key_dim == shape.value_dim in paged.VALUE_DIMS
        kernel = (
            token_kernels.attend(shape, codes)
            if alike and not in_key
            else coded_kernels.attend(shape, codes, size, in_key=in_key)
        )
        found = list(self._partial(recorder, attending, shape, splits=splits, rows=rows))
        places = [each.address for each in found]
        recorder.add(
            kernel.text,
            (rows, shape.blocks, splits),
            paged.LANES,
            arguments=[
                attending.q.address,
                *arguments,
                group.coded if some else group.tiles,
                inputs.table,
                attending.numbers,
                *places,
            ],
            reads=[attending.q],
            writes=found,
            shared=kernel.shared,
        )
        combine = token_kernels.combine(
            shape, splits, value_dim, turned=turn is not None, some=some
        )
        given = [signs, group.coded] if some else [signs]
        self._add_up(recorder, attending, found, source=combine, given=given, rows=rows)
        if some:
            to = self._decode(recorder, attending, codes, arrays=[*arguments, signs])
            self._attend_prompts(recorder, attending, to)
