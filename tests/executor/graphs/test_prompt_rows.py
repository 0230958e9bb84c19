"""Prompts over codes as recorded steps of many rows compute them, emulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest

from quire.attention.metadata import build_metadata
from quire.attention.paged.tiles import cut
from quire.attention.paged.tiling import Tiling
from quire.cache.specs import AttentionSpec, FullKV, KVLayout, WindowKV
from quire.core.kv_format import KVFormat
from quire.executor.graphs.attention import coded_pools, prompt_rows
from quire.executor.graphs.attention.prompt_rows import PromptRows
from quire.executor.graphs.input_numbers import step_numbers
from quire.executor.graphs.layout import InputLayout
from quire.executor.graphs.verifications import LongContexts
from tests.attention.rows import HandRows
from tests.engine.rows import scheduled
from tests.executor.graphs.layers import HeldLayer
from tests.support.emulated_metal import why_not

SCALE = 0.1
TABLES = [(7, 2), (4, 0, 6, 5), (1, 3)]
STEPS = [
    (63, 40, 0),  # two prompts, each within a block
    (
        1,
        90,
        9,
    ),  # a row that fills its tail, the rest of a prompt behind its tail, and a further one
    (2, 5, 55),  # rows of two blocks, of one, and a prompt that fills one
    (1, 1, 1),
]
"""How many rows each sequence has, step by step."""
ROOM, TAILS = 8, 3
TABLE = range(5)


@dataclass(frozen=True)
class Case:
    """A kind of attention over a format."""

    spec: AttentionSpec
    format: KVFormat
    heads: int = 4


PAGE, UNIFORM, TURBO = KVFormat("page", 4, 4), KVFormat("uniform", 8, 4), KVFormat("turbo", 4, 4)
CASES = {
    "page": Case(FullKV(2, 64), PAGE),
    "page, window": Case(WindowKV(2, 128, 50), KVFormat("page", 8, 3)),
    "page, 256": Case(FullKV(2, 256), KVFormat("page", 6, 8)),
    "page, short values": Case(FullKV(2, 192, value_dim=128), PAGE),
    "page, 96": Case(FullKV(2, 96), KVFormat("page", 5, 2)),
    "page, latents": Case(FullKV(1, 576, value_dim=512, value_in_key=True), PAGE, 20),
    "uniform": Case(WindowKV(2, 64, 50), UNIFORM),
    "uniform, latents": Case(FullKV(1, 576, value_dim=512, value_in_key=True), UNIFORM, 20),
    "turbo": Case(FullKV(2, 64), TURBO),
    "turbo, short values": Case(FullKV(2, 192, value_dim=128), KVFormat("turbo", 3.5, 3.5)),
}
EVERYDAY = "page"


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    "name",
    [name if name == EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_prompts_see_what_the_format_says(name: str) -> None:
    """Steps of many rows against the reference, which has all rows of a sequence in one."""
    assert_steps_agree(CASES[name], STEPS)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("name", ["page", pytest.param("uniform", marks=pytest.mark.slow)])
def test_rows_behind_the_most_streams_read_the_workspace(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (prompt_rows, coded_pools):
        monkeypatch.setattr(module, "STREAMS", 4)
    assert_steps_agree(CASES[name], [(60, 3, 2), (2, 2, 5), (1, 4, 1)])


@pytest.mark.parametrize("max_rows", [128, 512])
def test_a_step_has_no_more_tiles_than_its_graph(max_rows: int) -> None:
    """Inputs of graphs of up to 512 rows have room for the tiles of the largest of them."""
    rows = [scheduled(chr(200 + n), 63, 2, [[2 * n, 2 * n + 1]], PAGE) for n in range(20)]
    tiling = Tiling(32)
    memory = InputLayout(1, 512, 1000, lambda array: 0, tilings=[tiling], workspace=[1000])
    layout = KVLayout.of((FullKV(2, 64),))
    numbers = step_numbers(rows, layout, memory, 64, max_rows=max_rows)
    assert 2 * len(rows) > tiling.most_tiles(128)
    assert (numbers is None) == (2 * len(rows) > tiling.most_tiles(max_rows))
    assert memory.has_tiles(rows, max_rows, 64) == (numbers is not None)


@pytest.mark.parametrize("format", [PAGE, UNIFORM], ids=lambda each: each.name)
def test_tiles_are_not_more_than_expected(
    format: KVFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's graph is chosen by their largest number."""
    monkeypatch.setattr(prompt_rows, "STREAMS", 40)
    random, seen = Random(0), set[bool]()
    for _ in range(300):
        rows = [
            HandRows(random.randrange(200), random.choice([1, 2, 3, 9, 70]), format, (TABLE,), (0,))
            for _ in range(random.randrange(1, 40))
        ]
        tile_rows = random.choice([16, 32, 64])
        most = prompt_rows.most_tiles(rows, 64, tile_rows)
        found = PromptRows.of(build_metadata(0, FullKV(2, 64), rows, 64))
        seen.add(found is None)
        parts = () if found is None else cut(found.metadata, 0, 1, rows_many=tile_rows)
        tiles = sum(len(part.tiles) for part in parts)
        assert bool(tiles) == bool(most)
        assert tiles <= most
    assert len(seen) == 2


def assert_steps_agree(case: Case, steps: Sequence[Sequence[int]]) -> None:
    """Assert that steps compute what the reference does.

    Args:
        steps: how many rows each sequence has, step by step.
    """
    layer = HeldLayer(case.spec, case.format, TABLES, blocks=ROOM, tails=TAILS)
    reached = [0] * len(TABLES)
    for number, counts in enumerate(steps):
        projected = layer.projected(sum(counts), case.heads, number)
        metadata = layer.metadata(reached, counts)
        assert layer.error(metadata, projected, SCALE, many=True) < 2e-2, number
        reached = [start + count for start, count in zip(reached, counts, strict=True)]


def test_graphs_are_verified_again_when_contexts_double() -> None:
    """Steps of few rows, and over plain blocks, decode nothing."""
    lengths, contexts = [3000, 5000, 6000, 9000, 16_000, 17_000], LongContexts()
    again = [contexts.first(PAGE, 128, longest) for longest in lengths]
    assert again == [False, True, False, True, False, True]
    assert contexts.first(PAGE, 256, 5000)
    assert not contexts.first(PAGE, 64, 5000)
    assert not contexts.first(KVFormat(), 512, 5000)
