"""Compares a backend with the reference on this machine, over small random blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from quire.attention.backend import AttentionBackend, AttentionCase, Scoring
from quire.attention.metadata import AttentionMetadata, build_metadata
from quire.attention.reference import ReferenceBackend
from quire.attention.rows import AttentionRows
from quire.cache.formats.base import LayerShape, LayerStore
from quire.cache.formats.registry import make_store
from quire.cache.specs import FullKV
from quire.core.kv_format import KVFormat
from quire.device.verified import disagreement

Spans = Sequence[tuple[int, int]]
"""The first row and the number of rows of each sequence."""

SINGLE_ROWS: Spans = ((0, 1), (699, 1), (130, 1), (127, 1), (64, 1), (63, 1))
SPANS: Spans = (*SINGLE_ROWS, (300, 3), (40, 90), (0, 17))
"""Spans to check: single rows, several rows, and chunks of a prompt."""
_TOLERANCE = {mx.float32: 1e-4, mx.bfloat16: 3e-2, mx.float16: 4e-3}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one sequence; implements `AttentionRows`."""

    start: int
    count: int
    format: KVFormat
    blocks: Sequence[int]
    tail: int | None
    bidirectional: Sequence[tuple[int, int]] = ()

    def block_ids(self, group: int) -> array[int]:
        return array("i", self.blocks)

    def tail_block(self, group: int) -> int | None:
        return self.tail


def differs(
    backend: AttentionBackend,
    case: AttentionCase,
    spans: Spans,
    bidirectional: Spans = (),
) -> str | None:
    """Return how a backend differs from the reference in a case; None if close enough.

    Args:
        case: the case; its `rows` are replaced by those of `spans`.
        spans: rows of the sequences.
        bidirectional: ranges of keys in the first of them whose rows see each other: images.
    """
    rng = np.random.default_rng(0)
    store, metadata = _filled(case, spans, bidirectional, rng=rng)
    q = _normal(rng, (metadata.rows, case.heads, case.spec.head_dim), case.dtype)
    k, v = _keys_and_values(rng, metadata.rows, case)
    written = store.write(k, v, metadata.slots)
    scoring = Scoring(
        case.spec.head_dim**-0.5,
        20.0 if case.softcap else None,
        _normal(rng, (case.heads,), case.dtype) if case.sinks else None,
    )
    expected, got = (
        each.prepare(metadata).forward(q, store, written, scoring=scoring)
        for each in (ReferenceBackend(), backend)
    )
    return disagreement(got, expected, _TOLERANCE[case.dtype])


def _filled(
    case: AttentionCase,
    spans: Spans,
    bidirectional: Spans,
    rng: np.random.Generator,
) -> tuple[LayerStore, AttentionMetadata]:
    """Return a store filled with the keys before the rows, and the rows' metadata."""
    spec = case.spec.attention or FullKV(
        case.spec.kv_heads, case.spec.head_dim, value_dim=case.spec.value_dim
    )
    shape = LayerShape.of(case.spec, case.block_size, case.dtype)
    store = make_store(shape, case.format)
    sizes = [-(-(start + count) // case.block_size) for start, count in spans]
    ids = rng.permutation(sum(sizes)).astype(np.int32)
    tables = [each.tolist() for each in np.split(ids, np.cumsum(sizes)[:-1])]
    store.resize(sum(sizes), ())
    if store.has_tail:
        store.resize_tails(len(spans), ())

    def rows(start: int, count: int, number: int) -> AttentionRows:
        tail = number if store.has_tail else None
        images = () if number else bidirectional
        return Rows(
            start, count, case.format, blocks=tables[number], tail=tail, bidirectional=images
        )

    before = [rows(0, start, n) for n, (start, _) in enumerate(spans) if start]
    metadata = build_metadata(0, spec, before, block_size=case.block_size)
    store.write(*_keys_and_values(rng, metadata.rows, case), metadata.slots)
    own = [rows(start, count, n) for n, (start, count) in enumerate(spans)]
    return store, build_metadata(0, spec, own, block_size=case.block_size)


def _keys_and_values(
    rng: np.random.Generator, rows: int, case: AttentionCase
) -> tuple[mx.array, mx.array]:
    heads, dtype = case.spec.kv_heads, case.dtype
    k = _normal(rng, (rows, heads, case.spec.head_dim), dtype)
    if case.spec.value_in_key:
        return k, k[..., : case.spec.value_dim]
    return k, _normal(rng, (rows, heads, case.spec.value_dim), dtype)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
