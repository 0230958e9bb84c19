"""Rows over plain blocks as recorded steps compute them, emulated: kinds of attention."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest

from quire.attention.backend import Scoring
from quire.attention.metadata import build_metadata
from quire.attention.paged import cuda as paged
from quire.attention.paged import tiling
from quire.attention.paged.tiling import Tiling
from quire.attention.reference import ReferenceBackend
from quire.cache.formats.base import LayerShape
from quire.cache.formats.registry import make_store
from quire.cache.specs import AttentionSpec, FullKV, WindowKV
from quire.core.arrays import Ints
from quire.core.kv_format import KVFormat
from quire.device.cuda.driver import Card
from quire.executor.graphs import pools
from quire.executor.graphs.graph_cache import MAX_ROWS
from tests.attention.rows import HandRows
from tests.executor.graphs.layers import attended
from tests.support.emulated_card import SMALL
from tests.support.emulated_metal import why_not

SCALE = 0.1
TABLES = [(4, 0, 2), (1, 3)]
STEPS = [(40, 20), (30, 34), (1, 3)]
"""How many rows each sequence has, step by step."""


@dataclass(frozen=True)
class Case:
    """A kind of attention."""

    spec: AttentionSpec
    heads: int
    sinks: bool = False


CASES = {
    "sinks": Case(WindowKV(2, 64, 50), 4, sinks=True),
    "short values": Case(FullKV(2, 192, value_dim=128), 4),
    "heads of 80": Case(FullKV(2, 80), 8),
    "heads of 96": Case(FullKV(2, 96), 6, sinks=True),
    "latents": Case(FullKV(1, 576, value_dim=512, value_in_key=True), 20),
}
EVERYDAY = "sinks"


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    "name",
    [name if name == EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_rows_attend_as_the_reference_says(name: str) -> None:
    case, format = CASES[name], KVFormat()
    spec, heads = case.spec, case.heads
    ours, theirs = (make_store(LayerShape.of(spec, 64, mx.bfloat16), format) for _ in range(2))
    for store in (ours, theirs):
        store.resize(5, ())
    sinks = _normal((heads,), 99) if case.sinks else None
    reached = [0] * len(TABLES)
    for number, counts in enumerate(STEPS):
        rows = [
            HandRows(start, count, format, (table,))
            for start, count, table in zip(reached, counts, TABLES, strict=True)
        ]
        metadata = build_metadata(0, spec, rows, 64)
        total = sum(counts)
        projected = {
            "q": _normal((total, heads, spec.head_dim), 3 * number),
            "k": _normal((total, spec.kv_heads, spec.head_dim), 3 * number + 1),
            "v": _normal((total, spec.kv_heads, spec.value_dim), 3 * number + 2),
        }
        if spec.value_in_key:
            projected["v"] = projected["k"][..., : spec.value_dim]
        found = attended(ours, metadata, projected, SCALE, sinks=sinks)
        written = theirs.write(projected["k"], projected["v"], metadata.slots)
        prepared = ReferenceBackend().prepare(metadata)
        wanted = prepared.forward(projected["q"], theirs, written, Scoring(SCALE, None, sinks))
        errors = _norms(found - wanted) / _norms(wanted)
        assert errors.max().item() < 1e-2
        reached = [start + count for start, count in zip(reached, counts, strict=True)]


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_few_thread_blocks_take_all_single_rows_beside_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of four sequences, of which a prompt is the second, by one thread block a KV head."""
    monkeypatch.setattr(pools, "_MOSTLY_PROMPTS", 2 * MAX_ROWS)
    monkeypatch.setattr(paged, "_MULTIPROCESSORS", 1)
    tables, reached, counts = [(4, 0), (1, 3), (2,), (5, 6)], [70, 0, 0, 90], [1, 12, 2, 3]
    assert _error_beside_prompts(5, tables, reached, counts, SMALL) < 1e-2


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_thread_blocks_of_warpgroups_share_the_keys_of_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a row that generates, and a prompt of which no key is shared."""
    card = Card(multiprocessors=24, shared=227 << 10, warpgroups=True)
    monkeypatch.setattr(tiling, "_PIECE_COST", 1)
    cuts = list[int]()
    shared = Tiling.shared

    def noted(self: Tiling, tiles: Ints) -> Ints:
        cuts.append(int((shared(self, tiles)[:, 5] & 255).max()))
        return shared(self, tiles)

    monkeypatch.setattr(Tiling, "shared", noted)
    tables = [(0,), tuple(range(1, 17)), (17, 18)]
    assert _error_beside_prompts(2, tables, [7, 900, 0], [1, 90, 70], card) < 1e-2
    assert max(cuts) > 2


def _error_beside_prompts(
    heads: int,
    tables: list[tuple[int, ...]],
    reached: list[int],
    counts: list[int],
    card: Card,
) -> float:
    """Return the largest relative error of a row, of sequences with so many more rows."""
    spec, format, worst = FullKV(heads, 64), KVFormat(), 0.0
    ours, theirs = (make_store(LayerShape.of(spec, 64, mx.bfloat16), format) for _ in range(2))
    for store in (ours, theirs):
        store.resize(1 + max(map(max, tables)), ())
    for starts, each in (([0] * len(reached), reached), (reached, counts)):
        rows = [
            HandRows(start, count, format, (table,))
            for start, count, table in zip(starts, each, tables, strict=True)
            if count
        ]
        metadata = build_metadata(0, spec, rows, 64)
        q, k, v = (_normal((sum(each), heads, 64), seed) for seed in range(3))
        written = theirs.write(k, v, metadata.slots)
        if starts is not reached:  # what is read later
            ours.write(k, v, metadata.slots)
            mx.eval(ours.arrays())
            continue
        projected = {"q": q, "k": k, "v": v}
        found = attended(ours, metadata, projected, SCALE, many=True, card=card)
        prepared = ReferenceBackend().prepare(metadata)
        wanted = prepared.forward(q, theirs, written, Scoring(SCALE, None, None))
        worst = (_norms(found - wanted) / _norms(wanted)).max().item()
    return worst


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("sinks", [False, True])
def test_thread_blocks_share_the_keys_of_rows(sinks: bool) -> None:
    """One row of each of three sequences, whose keys three, one and two thread blocks share."""
    spec, format, reached = FullKV(2, 128), KVFormat(), [600, 3, 300]
    tables = [tuple(range(10)), (10,), tuple(range(11, 16))]
    ours, theirs = (make_store(LayerShape.of(spec, 64, mx.bfloat16), format) for _ in range(2))
    weights = _normal((16,), 99) if sinks else None
    for store in (ours, theirs):
        store.resize(16, ())
    for starts, counts in (([0] * 3, reached), (reached, [1] * 3)):
        rows = [
            HandRows(start, count, format, (table,))
            for start, count, table in zip(starts, counts, tables, strict=True)
        ]
        metadata = build_metadata(0, spec, rows, 64)
        q, k, v = (_normal((sum(counts), n, 128), seed) for seed, n in enumerate((16, 2, 2)))
        written = theirs.write(k, v, metadata.slots)
        if starts is not reached:  # what is read later
            ours.write(k, v, metadata.slots)
            mx.eval(ours.arrays())
    found = attended(ours, metadata, {"q": q, "k": k, "v": v}, SCALE, sinks=weights)
    prepared = ReferenceBackend().prepare(metadata)
    wanted = prepared.forward(q, theirs, written, Scoring(SCALE, None, weights))
    assert (_norms(found - wanted) / _norms(wanted)).max().item() < 1e-2


def _norms(x: mx.array) -> mx.array:
    """Return the norms of rows `[T, heads, dim]`."""
    return mx.linalg.norm(x.astype(mx.float32), axis=(1, 2))


def _normal(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(mx.bfloat16)
