"""Pools of coded KV blocks: the page format, and codes of single tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from quire.attention.backend import AttentionCase
from quire.attention.paged import cuda as paged
from quire.attention.paged import packed, tokens
from quire.attention.paged import portable_kernels as portable
from quire.cache.formats.base import LayerStore
from quire.cache.formats.codecs import padded
from quire.cache.formats.tokens import TokenStore
from quire.cache.specs import KVSpec
from quire.executor.graphs.attention import attention_kernels, coded_kernels, token_kernels
from quire.executor.graphs.attention.attention_recorder import AttentionRecorder
from quire.executor.graphs.attention.coding_check import (
    KernelRunner,
    tail_coding_differs,
    token_coding_differs,
)
from quire.executor.graphs.attention.heads import Coding, code_parts, code_tables
from quire.executor.graphs.attention.layer_attention import LayerAttention
from quire.executor.graphs.attention.pools import Destination, LayerPool, TailCoding
from quire.executor.graphs.attention.workspaces import STREAMS
from quire.executor.graphs.recorder import Buffer, Recorder

_DECODING_BLOCKS = 8
"""Thread blocks of a multiprocessor that decode, or code, the blocks of a workspace."""


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

    def _read_decoded(
        self, attention: AttentionRecorder, codes: portable.Codes, arrays: Sequence[int]
    ) -> None:
        """Record the kernels by which prompts decode the blocks that they read, and attend.

        Args:
            arrays: the arguments of `coded_kernels.decode_prompts` from the arrays of keys to the
                signs.
        """
        shape, in_key = attention.shape, attention.in_key
        to = self._workspace(attention.recorder, shape.kv_heads, shape.key_dim, in_key=in_key)
        group = attention.inputs
        if attention.layer.k is not None:
            halves = 1 if in_key else 2
            attention.add(
                coded_kernels.decode_prompts(shape, codes, in_key=in_key),
                _decoding_grid(attention.recorder, shape.kv_heads, halves),
                [group.decoded, attention.table, *arrays, *to.arrays],
                writes=[to.buffer],
                after=[to.buffer],
                threads=coded_kernels.DECODING_THREADS,
            )
        attention.attend_tiles(to.arrays, tiles=group.prompts, after=[to.buffer])


def _decoding_grid(recorder: Recorder, kv_heads: int, halves: int) -> tuple[int, int, int]:
    """Return the thread blocks that decode, or code, the heads of a workspace's blocks.

    Args:
        halves: 2 if keys and values have thread blocks of their own.
    """
    together = recorder.card.multiprocessors * _DECODING_BLOCKS
    return together // (kv_heads * halves) or 1, kv_heads, halves


def streams(recorder: Recorder) -> int:
    """Return the most rows of a step that read codes."""
    return min(recorder.max_rows, STREAMS)


@dataclass(frozen=True, slots=True)
class PagePool(CodedPool):
    """Pool of the `page` format: full blocks coded, a sequence's tail plain.

    Attributes:
        codes: how blocks are coded.
    """

    codes: portable.Codes

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
        assert store.packed is not None, "full blocks hold codes"
        codes = portable.Codes.of(store.packed.coded())
        arrays = tuple(map(address, store.arrays()))
        return cls(group, store.shape.block_size, arrays, codes=codes)

    def tail_coding(self, spec: KVSpec) -> TailCoding | None:
        value_dim = 0 if spec.value_in_key else spec.value_dim
        return TailCoding(
            self.group, spec.kv_heads, spec.head_dim, value_dim=value_dim, codes=self.codes
        )

    def _destination(self, recorder: Recorder, layer: LayerAttention) -> Destination:
        group, tails = recorder.inputs.group(self.group), self.arrays[-1:]
        if not layer.spec.value_in_key:
            tails = self.arrays[-2:]
        tails = (*tails, *tails)[:2]
        if layer.k is None or not recorder.inputs.tilings:
            return Destination(group.tails, group.offsets, coding=None, arrays=tails)
        in_key = layer.spec.value_in_key
        to = self._workspace(recorder, layer.spec.kv_heads, layer.spec.head_dim, in_key=in_key)
        arrays = *tails, *to.arrays
        return Destination(
            group.tails, group.offsets, coding=None, arrays=arrays, workspace=to.buffer
        )

    def _attend(self, attention: AttentionRecorder) -> None:
        """Record attention over coded blocks and each row's plain tail."""
        shape, chosen = attention.shape, attention.layer.chosen
        group, rows, some = attention.inputs, streams(attention.recorder), attention.has_tiles
        splits = attention.splits(rows)
        arrays, in_key = self.arrays, attention.in_key
        if in_key:
            arrays = (*2 * arrays[:3], *2 * arrays[3:])
        if chosen is not None:
            copy = chosen.decoding(self.codes, shape.key_dim, turned=False)
            own = *arrays[:3], group.coded, group.tails, arrays[6]
            attention.attend_chosen(chosen, copy, own)
            return
        found = [*attention.partial(splits, rows), *attention.partial(1, rows)]
        places = [each.address for each in found]
        arguments = [attention.q.address, *arrays, group.coded, group.own, attention.table]
        arguments += [group.tails, group.visible, attention.numbers, *places]
        if in_key or shape.value_dim not in paged.VALUE_DIMS:
            size = shape.key_dim if in_key else shape.value_dim
            kernel = coded_kernels.attend(shape, self.codes, size, in_key=in_key)
            source, shared = kernel.text, kernel.shared
        else:
            source = attention_kernels.attend_packed(shape, self.codes)
            shared = packed.shared_memory(shape, self.codes)
        grid = rows, shape.blocks, splits + 1
        attention.add(source, grid, arguments, writes=found, shared=shared)
        signs = 0 if in_key else attention.recorder.copied(packed.signs(shape.value_dim))
        join = attention_kernels.join(shape, splits, turned=not in_key, some=some)
        given = [signs, group.own] if some else [signs]
        attention.add_up(found, join, given=given, rows=rows)
        if some:
            self._read_prompts(attention, arrays)

    def _read_prompts(self, attention: AttentionRecorder, arrays: tuple[int, ...]) -> None:
        """Record the kernels by which prompts code the blocks that they fill, and attend.

        Args:
            arrays: codes, scales and biases of keys and of values, then both tails.
        """
        shape, in_key, recorder = attention.shape, attention.in_key, attention.recorder
        group, dim = attention.inputs, shape.value_dim
        to = self._workspace(recorder, shape.kv_heads, shape.key_dim, in_key=in_key)
        if attention.layer.k is not None:
            own = self.arrays if in_key else arrays
            signs = 0 if in_key else recorder.copied(packed.signs(dim))
            halves = to.arrays[:1] if in_key else to.arrays
            attention.add(
                attention_kernels.code_written(
                    shape.kv_heads, shape.key_dim, 0 if in_key else dim, codes=self.codes
                ),
                _decoding_grid(recorder, shape.kv_heads, 1),
                [group.decoded, group.written, signs, *own, *halves],
                writes=[to.buffer],
                after=[to.buffer],
                threads=attention_kernels.TAIL_THREADS,
            )
        scaled = 0 if in_key else recorder.constant(packed.signs(dim) * dim**-0.5)
        self._read_decoded(attention, self.codes, arrays=[*arrays, scaled])


@dataclass(frozen=True, slots=True)
class TokenPool(CodedPool):
    """Pool of codes of single tokens. Every key, the row's own too, is read as codes.

    Attributes:
        store: the layer's store.
    """

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

    def _attend(self, attention: AttentionRecorder) -> None:
        shape, recorder, chosen = attention.shape, attention.recorder, attention.layer.chosen
        coded = self.store.coded()
        codes, turn = portable.Codes.of(coded), coded.layout.value_rotation
        arguments = list[int]()
        for *parts, last_part in (coded.keys, coded.values):
            # Biases are of the pool, levels are not.
            own = recorder.copied if codes.codebook else recorder.address
            arguments += [*map(recorder.address, parts), own(last_part)]
        signs = 0 if turn is None else recorder.constant(turn.signs * turn.transform_scale)
        group, in_key = attention.inputs, attention.in_key
        if chosen is not None:
            copy = chosen.decoding(codes, shape.key_dim, turned=turn is not None)
            attention.attend_chosen(chosen, copy, [*arguments[:3], signs])
            return
        rows, some = streams(recorder), attention.has_tiles
        size, padded = portable.coded_value_size(coded), attention
        if turn is not None:  # all of a rotated sum is needed to turn it back
            padded = replace(attention, shape=replace(shape, value_dim=size))
        whole, splits = padded.shape, padded.splits(rows)
        alike = whole.key_dim == whole.value_dim in paged.VALUE_DIMS
        kernel = (
            token_kernels.attend(whole, codes)
            if alike and not in_key
            else coded_kernels.attend(whole, codes, size, in_key=in_key)
        )
        found = padded.partial(splits, rows)
        tiles = group.coded if some else group.tiles
        given = [*arguments, tiles, attention.table, attention.numbers]
        attention.add(
            kernel.text,
            (rows, whole.blocks, splits),
            [attention.q.address, *given, *(each.address for each in found)],
            writes=found,
            shared=kernel.shared,
        )
        combine = token_kernels.combine(
            whole, splits, shape.value_dim, turned=turn is not None, some=some
        )
        attention.add_up(found, combine, given=[signs, *[group.coded] * some], rows=rows)
        if some:
            self._read_decoded(attention, codes, arrays=[*arguments, signs])
