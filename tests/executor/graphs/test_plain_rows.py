"""Rows over plain blocks as recorded steps compute them, emulated: kinds of attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from quire.attention.paged import cuda as paged
from quire.attention.paged import tiling
from quire.attention.paged.tiling import Tiling
from quire.cache.specs import AttentionSpec, FullKV, WindowKV
from quire.core.arrays import Ints
from quire.core.kv_format import KVFormat
from quire.device.cuda import boxes
from quire.device.cuda.driver import Card
from quire.executor.graphs.attention import attention_recorder
from quire.executor.graphs.attention.attention_recorder import AttentionRecorder
from quire.executor.graphs.graph_cache import MAX_ROWS
from tests.executor.graphs.layers import HeldLayer, normal
from tests.support.emulated_card import SMALL, emulate_boxes
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
    case = CASES[name]
    layer = HeldLayer(case.spec, KVFormat(), TABLES, blocks=5)
    sinks = normal((case.heads,), 99) if case.sinks else None
    reached = [0] * len(TABLES)
    for number, counts in enumerate(STEPS):
        metadata = layer.metadata(reached, counts)
        projected = layer.projected(sum(counts), case.heads, number)
        assert layer.error(metadata, projected, SCALE, sinks) < 1e-2
        reached = [start + count for start, count in zip(reached, counts, strict=True)]


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_few_thread_blocks_take_all_single_rows_beside_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of four sequences, of which a prompt is the second, by one thread block a KV head."""
    monkeypatch.setattr(attention_recorder, "_MOSTLY_PROMPTS", 2 * MAX_ROWS)
    tables, reached, counts = [(4, 0), (1, 3), (2,), (5, 6)], [70, 0, 0, 90], [1, 12, 2, 3]
    card = replace(SMALL, multiprocessors=1)
    assert _error_beside_prompts(5, tables, reached, counts, card) < 1e-2


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_thread_blocks_of_warpgroups_share_the_keys_of_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a row that generates, and a prompt of which no key is shared."""
    emulate_boxes(monkeypatch)
    cuts = _noted_cuts(monkeypatch)
    tables = [(0,), tuple(range(1, 17)), (17, 18)]
    assert _error_beside_prompts(2, tables, [7, 900, 0], [1, 90, 70], HOPPER) < 1e-2
    assert max(cuts[0][:, 5] & 255) > 2


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_prompts_over_keys_that_boxes_do_not_reach_are_copied_by_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulate_boxes(monkeypatch)
    monkeypatch.setattr(boxes, "reaches", lambda address: False)
    sources, add = list[str](), AttentionRecorder.add

    def noted(self: AttentionRecorder, source: str, *given: Any, **options: Any) -> None:
        sources.append(source)
        add(self, source, *given, **options)

    monkeypatch.setattr(AttentionRecorder, "add", noted)
    tables = [(0,), tuple(range(1, 4)), (4, 5)]
    assert _error_beside_prompts(2, tables, [7, 90, 0], [1, 90, 70], HOPPER) < 1e-2
    assert ["#define BOX 0\n" in each for each in sources] == [False, True]


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_thread_blocks_share_the_keys_of_single_rows_beside_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row with many keys, one with few, a prompt, and three drafted rows with many keys."""
    emulate_boxes(monkeypatch)
    cuts = _noted_cuts(monkeypatch)
    monkeypatch.setattr(tiling, "_MANY_KEYS", 500)
    tables = [tuple(range(16)), (16,), (17, 18), tuple(range(19, 30))]
    assert _error_beside_prompts(2, tables, [900, 7, 0, 600], [1, 1, 70, 3], HOPPER) < 1e-2
    pieces = {row: sum(cuts[0][:, 0] == row) for row in (0, 1, 2, 72)}
    assert pieces[0] > 2 < pieces[72]
    assert (pieces[1], pieces[2]) == (0, 1)


HOPPER = Card(multiprocessors=24, shared=227 << 10, warpgroups=True)


def _noted_cuts(monkeypatch: pytest.MonkeyPatch) -> list[Ints]:
    """Return a list of the tiles of all launches to come, in pieces that cost little."""
    cuts, shared = list[Ints](), Tiling.shared

    def noted(self: Tiling, tiles: Ints) -> Ints:
        cuts.append(shared(self, tiles))
        return cuts[-1]

    monkeypatch.setattr(tiling, "_PIECE_COST", 1)
    monkeypatch.setattr(tiling, "_SINGLE_COST", 9)
    monkeypatch.setattr(Tiling, "shared", noted)
    return cuts


def _error_beside_prompts(
    heads: int,
    tables: list[tuple[int, ...]],
    reached: list[int],
    counts: list[int],
    card: Card,
) -> float:
    """Return the largest relative error of a row, of sequences with so many more rows."""
    layer = HeldLayer(FullKV(heads, 64), KVFormat(), tables, blocks=1 + max(map(max, tables)))
    before = layer.metadata([0] * len(reached), reached)
    layer.write(before, layer.projected(sum(reached), heads))
    metadata, projected = layer.metadata(reached, counts), layer.projected(sum(counts), heads)
    return layer.error(metadata, projected, SCALE, many=True, card=card)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("sinks", [False, True])
def test_thread_blocks_share_the_keys_of_rows(sinks: bool) -> None:
    """One row of each of three sequences, whose keys three, one and two thread blocks share."""
    reached = [600, 3, 300]
    tables = [tuple(range(10)), (10,), tuple(range(11, 16))]
    layer = HeldLayer(FullKV(2, 128), KVFormat(), tables, blocks=16)
    before = layer.metadata([0] * 3, reached)
    layer.write(before, layer.projected(sum(reached), 16))
    weights = normal((16,), 99) if sinks else None
    metadata = layer.metadata(reached, [1] * 3)
    assert layer.error(metadata, layer.projected(3, 16), SCALE, weights) < 1e-2


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_half_the_splits_share_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 splits of eight KV heads do not run at a time, so 17 of them share 4,101 keys, not 33."""
    monkeypatch.setattr(paged.Shape, "splits", lambda *_: 64)
    layer = HeldLayer(FullKV(8, 64), KVFormat(), [tuple(range(65))], blocks=65)
    layer.write(layer.metadata([0], [4100]), layer.projected(4100, 8))
    metadata, projected = layer.metadata([4100], [1]), layer.projected(1, 8)
    assert layer.error(metadata, projected, SCALE) < 1e-2
