"""Pools of coded KV blocks: the page format, and codes of single tokens."""

from __future__ import annotations

from collections.abc import Callable
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
from quire.executor.graphs.recorder import Recorder


@dataclass(frozen=True, slots=True)
class PagePool(LayerPool):
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
        return Destination(group.tails, group.offsets, coding=None, arrays=(*tails, *tails)[:2])

    def _attend(self, recorder: Recorder, attending: Attending) -> None:
        """Record attention over coded blocks and each row's plain tail."""
        shape, inputs, chosen = attending.shape, recorder.inputs, attending.chosen
        group, splits = inputs.group(self.group), splits_of(recorder, shape)
        arrays, in_key = self.arrays, attending.value_in_key
        if in_key:
            arrays = (*2 * arrays[:3], *2 * arrays[3:])
        if chosen is not None:
            more = group.coded, group.tails, arrays[6]
            keys = CodedKeys(self.codes.by_channel, arrays[:3], more)
            copies = chosen.decoded(recorder, group, attending.q, keys=keys, dim=shape.key_dim)
            self._attend_chosen(recorder, attending, chosen, copies=copies)
            return
        found = [
            *self._partial(recorder, attending, shape, splits=splits),
            *self._partial(recorder, attending, shape, splits=1),
        ]
        places = [each.address for each in found]
        arguments = [attending.q.address, *arrays, group.coded, group.own, inputs.table]
        arguments += [group.tails, group.visible, attending.numbers, *places]
        grid = recorder.max_rows, shape.kv_heads * (shape.group // shape.part), splits + 1
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
        join = kernels.join(shape, splits, turned=not in_key)
        self._add_up(recorder, attending, found, source=join, given=signs)


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
        spec = case.spec
        known = case.format.scheme in ("uniform", "turbo") and case.dtype == mx.bfloat16
        known = known and spec.attention is not None and case.block_size % tokens.KEYS == 0
        dims = spec.head_dim, spec.value_dim
        return known and dims == tuple(map(padded, dims)) and coded_kernels.takes(*dims)

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
        shape, inputs, chosen = attending.shape, recorder.inputs, attending.chosen
        coded = self.store.coded()
        codes, turn = portable.Codes.of(coded), coded.layout.value_rotation
        arguments = list[int]()
        for *parts, last_part in (coded.keys, coded.values):
            # Biases are of the pool, levels are not.
            own = recorder.copied if codes.codebook else recorder.address
            arguments += [*map(recorder.address, parts), own(last_part)]
        signs = 0 if turn is None else recorder.constant(turn.signs * turn.transform_scale)
        group, in_key = inputs.group(self.group), attending.value_in_key
        if chosen is not None:
            keys = CodedKeys(codes, tuple(arguments[:3]), (signs,), turned=turn is not None)
            copies = chosen.decoded(recorder, group, attending.q, keys=keys, dim=shape.key_dim)
            self._attend_chosen(recorder, attending, chosen, copies=copies)
            return
        value_dim, size = shape.value_dim, portable.coded_value_size(coded)
        if turn is not None:  # all of a rotated sum is needed to turn it back
            shape = replace(shape, value_dim=size)
        splits = splits_of(recorder, shape)
        alike = shape.key_dim == shape.value_dim in paged.VALUE_DIMS
        kernel = (
            token_kernels.attend(shape, codes)
            if alike and not in_key
            else coded_kernels.attend(shape, codes, size, in_key=in_key)
        )
        found = list(self._partial(recorder, attending, shape, splits=splits))
        places = [each.address for each in found]
        recorder.add(
            kernel.text,
            (recorder.max_rows, kernel.blocks, splits),
            kernel.threads,
            arguments=[
                attending.q.address,
                *arguments,
                group.tiles,
                inputs.table,
                attending.numbers,
                *places,
            ],
            reads=[attending.q],
            writes=found,
            shared=kernel.shared,
        )
        combine = token_kernels.combine(shape, splits, value_dim, turned=turn is not None)
        self._add_up(recorder, attending, found, source=combine, given=signs)
