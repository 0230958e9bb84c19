"""Which sizes of graph a step may run as."""

from __future__ import annotations

import pytest

from quire.cache.specs import AttentionSpec, FullKV, KVLayout, WindowKV
from quire.core.kv_format import KVFormat
from quire.executor.graphs.sizes import GraphSizes
from tests.engine.rows import scheduled

PLAIN, TAILS = KVFormat(), KVFormat("page", 4, 4)
FULL, SLIDING = FullKV(2, 64), WindowKV(2, 64, 1024)


def sizes(
    *rows: tuple[int, int],
    layout: tuple[AttentionSpec, ...] = (FULL,),
    format: KVFormat = PLAIN,
    most: int = 512,
) -> list[int]:
    """Return the sizes for sequences with so many tokens before so many rows."""
    sequences = [
        scheduled(chr(97 + n), start, count, [[0]], format) for n, (start, count) in enumerate(rows)
    ]
    return GraphSizes(KVLayout.of(layout), 64).of(sequences, most)


def test_the_smallest_graph_comes_first() -> None:
    assert sizes((0, 1)) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert sizes((0, 60), (90, 1)) == [64, 128, 256, 512]
    assert sizes((0, 65)) == [128, 256, 512]
    assert sizes((0, 513)) == []


def test_prompts_after_many_tokens_are_read_by_tiles() -> None:
    assert sizes((18_000, 63), (90, 1)) == [128, 256, 512, 64]
    assert sizes((30_000, 20), (90, 1)) == [128, 256, 512, 32, 64]
    assert sizes((8000, 63), (90, 1)) == [64, 128, 256, 512]


def test_single_rows_and_drafts_are_none_of_prompts() -> None:
    assert sizes(*[(18_000, 1)] * 26) == [32, 64, 128, 256, 512]
    assert sizes(*[(18_000, 8)] * 8) == [64, 128, 256, 512]


def test_keys_outside_of_windows_do_not_count() -> None:
    assert sizes((30_000, 20), layout=(SLIDING, SLIDING)) == [32, 64, 128, 256, 512]
    assert sizes((18_000, 63), layout=(SLIDING, FULL)) == [128, 256, 512, 64]
    assert sizes((30_000, 20), layout=(*[SLIDING] * 5, FULL)) == [32, 64, 128, 256, 512]


def test_codes_have_no_larger_graph() -> None:
    assert sizes((18_000, 63), most=64) == [64]


@pytest.mark.parametrize(("start", "least"), [(0, 16), (60, 128)])
def test_rows_in_two_blocks_with_tails_need_a_larger_graph(start: int, least: int) -> None:
    assert sizes((start, 16), format=TAILS)[0] == least
