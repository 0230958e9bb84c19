"""The backend that reads blocks in place, on NVIDIA's tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import mlx.core as mx
import numpy as np

from quire.attention.backend import AttentionCase, PreparedAttention, Scoring
from quire.attention.metadata import AttentionMetadata
from quire.attention.paged import cuda, packed
from quire.attention.paged.checked import CheckedBackend
from quire.attention.paged.prompts import CodedPrompts
from quire.attention.paged.tiles import FEW_ROWS, Part, cut
from quire.cache.formats.base import LayerStore, PackedStore, WrittenBlocks
from quire.device.cuda.driver import card


class PagedBackend(CheckedBackend):
    """Supports plain blocks of the queries' type, and page codes."""

    name = "paged attention on tensor cores"

    def made_for(self, case: AttentionCase) -> bool:
        return kernels_serve(case)

    def prepare(self, metadata: AttentionMetadata) -> PreparedAttention:
        return _Prepared(metadata)


def kernels_serve(case: AttentionCase) -> bool:
    """Return whether kernels support a case."""
    spec = case.spec
    return (
        (_serves_plain(case) or _serves_packed(case))
        and case.block_size % 8 == 0
        and spec.head_dim <= max(cuda.VALUE_DIMS)
        and cuda.takes(spec.head_dim, spec.value_dim)
    )


def _serves_plain(case: AttentionCase) -> bool:
    known = case.format.scheme == "plain" and not case.format.dtype and case.dtype in cuda.TYPES
    return known and not case.spec.value_in_key and not _fused_by_mlx(case)


def _fused_by_mlx(case: AttentionCase) -> bool:
    """Return whether MLX's fused attention reads a prompt faster.

    2,048 rows after 18,000 keys with heads of 128 take 3.6 ms instead of 5.3 on an H200.
    """
    prompt = case.rows > FEW_ROWS and case.spec.sees_all and not case.softcap
    return prompt and max(case.spec.head_dim, case.spec.value_dim) <= 128


def _serves_packed(case: AttentionCase) -> bool:
    if case.spec.attention is None:  # blocks of media have no tails
        return False
    known = case.format.scheme == "page" and case.block_size == packed.BLOCK_SIZE
    known = known and case.spec.head_dim % 32 == 0 and case.spec.value_dim in cuda.VALUE_DIMS
    return known and case.dtype == mx.bfloat16


_OverCodes = Callable[[mx.array, PackedStore, WrittenBlocks | None, Scoring], mx.array]


class _Prepared(PreparedAttention):
    """A step's parts on the device. They are cut when the first layer gives the number of query
    heads.
    """

    def __init__(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._table = mx.array(metadata.block_table)
        self._parts: dict[int, list[tuple[slice, cuda.Launch]]] = {}
        self._coded: list[tuple[slice, slice, _OverCodes]] = []

    def forward(
        self, q: mx.array, store: LayerStore, written: WrittenBlocks | None, scoring: Scoring
    ) -> mx.array:
        spec = self._metadata.spec
        shape = cuda.Shape(
            q.dtype,
            spec.head_dim,
            spec.value_dim,
            kv_heads=spec.kv_heads,
            group=q.shape[1] // spec.kv_heads,
            block_size=self._metadata.block_size,
            capped=scoring.softcap is not None,
            sinks=scoring.sinks is not None,
        )
        if store.packed is not None:
            return self._over_codes(q, store.packed, written, scoring=scoring, shape=shape)
        keys, values = store.arrays()
        parts = self._parts.get(shape.part)
        if parts is None:
            parts = self._parts[shape.part] = [
                (part.rows, self._launch(part, shape)) for part in self._cut(shape)
            ]
        outs = [
            cuda.attend(
                q if len(parts) == 1 else q[rows],
                keys,
                values,
                launch=launch,
                scoring=scoring,
                shape=shape,
            )
            for rows, launch in parts
        ]
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    def _over_codes(
        self,
        q: mx.array,
        store: PackedStore,
        written: WrittenBlocks | None,
        scoring: Scoring,
        shape: cuda.Shape,
    ) -> mx.array:
        if not self._coded:
            self._coded = _coded_parts(self._metadata, shape)
        outs = [
            attend(
                q if len(self._coded) == 1 else q[rows],
                store,
                None if written is None else written.part(chunks),
                scoring,
            )
            for rows, chunks, attend in self._coded
        ]
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    def _cut(self, shape: cuda.Shape) -> list[Part]:
        few, many = shape.rows(few=True), shape.rows(few=False)
        return list(cut(self._metadata, FEW_ROWS, few, rows_many=many))

    def _launch(self, part: Part, shape: cuda.Shape) -> cuda.Launch:
        count = len(part.tiles)
        splits = shape.splits(count, card()) if part.few else 1
        tiles, visible = mx.array(part.tiles), mx.array(part.visible)
        return cuda.Launch(tiles, self._table, visible, count=count, few=part.few, splits=splits)


def _coded_parts(
    metadata: AttentionMetadata, shape: cuda.Shape
) -> list[tuple[slice, slice, _OverCodes]]:
    """Divide sequences into runs of adjacent ones with one row each, or with several rows each.

    Returns:
        For each run its rows, its range among the chunks (sequences with several rows; empty for
        single rows), and what computes it.
    """
    single = metadata.counts == 1
    changes = (np.flatnonzero(single[1:] != single[:-1]) + 1).tolist()
    parts: list[tuple[slice, slice, _OverCodes]] = []
    chunks = 0
    for start, end in pairwise([0, *changes, metadata.sequences]):
        part = metadata.part(start, end)
        rows = slice(*metadata.query_starts[[start, end]].tolist())
        several = 0 if single[start] else end - start
        attend = _single_rows(part, shape) if single[start] else _prompts(part, shape)
        parts.append((rows, slice(chunks, chunks + several), attend))
        chunks += several
    return parts


def _single_rows(metadata: AttentionMetadata, shape: cuda.Shape) -> _OverCodes:
    launch = packed.launch(metadata, shape)
    return lambda q, store, _, scoring: packed.attend(
        q, store, launch, scoring=scoring, shape=shape
    )


def _prompts(metadata: AttentionMetadata, shape: cuda.Shape) -> _OverCodes:
    prompts = CodedPrompts(metadata)

    def attend(
        q: mx.array, store: PackedStore, written: WrittenBlocks | None, scoring: Scoring
    ) -> mx.array:
        assert written is not None, "sequences with several rows write blocks"
        return prompts.attend(q, store, written, scoring=scoring, shape=shape)

    return attend
