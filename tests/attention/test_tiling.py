"""Tiles whose keys several thread blocks share."""

from __future__ import annotations

import numpy as np
import pytest

from quire.attention.paged.tiling import Tiling


def tiles_of(*keys: tuple[int, int]) -> np.ndarray:
    """Return tiles with these ranges of keys, whose first rows number them."""
    found = np.full((len(keys), 6), 9, np.int32)
    found[:, 0] = np.arange(len(keys))
    found[:, 2:4] = keys
    return found


@pytest.mark.parametrize("at_once", [0, 40, 132])
@pytest.mark.parametrize("count", [1, 3, 17, 70])
def test_pieces_have_each_key_of_their_tile_once(count: int, at_once: int) -> None:
    random = np.random.default_rng(count)
    lows = random.integers(0, 300, count)
    tiles = tiles_of(*zip(lows, lows + random.integers(1, 20_000, count), strict=True))
    found = Tiling(32, 8, at_once).shared(tiles)
    for tile in tiles:
        own = found[found[:, 0] == tile[0]]
        assert own[0, 2] == tile[2]
        assert own[-1, 3] == tile[3]
        assert (own[1:, 2] == own[:-1, 3]).all()
        assert not (own[1:, 2] % 128).any(), "no pass has keys of two pieces"
        assert (own[:, [1, 4]] == tile[[1, 4]]).all()
        pieces = own[:, 5]
        if len(own) == 1:
            assert not pieces[0]
        else:
            place = np.flatnonzero(found[:, 0] == tile[0])[0]
            expected = (place << 16) + (np.arange(len(own)) << 8) + len(own)
            assert (pieces == expected).all()
    assert len(found) <= max(count, Tiling(32, 8, at_once).most_shared)


def longest(tiles: np.ndarray, heads: int, at_once: int) -> int:
    """Return how many keys the last thread block ends after, each with the next tile in order."""
    ends = np.zeros(at_once, int)
    for _ in range(heads):
        for tile in tiles:
            ends[ends.argmin()] += tile[3] - tile[2]
    return int(ends.max())


@pytest.mark.parametrize(("rows", "least"), [(137, 2.4), (544, 1.4), (1024, 1.0), (2048, 1.0)])
def test_few_tiles_after_a_long_context_end_sooner(rows: int, least: float) -> None:
    keys = [(0, 18_000 + first + 32) for first in range(0, rows, 32)]
    whole, cut = (Tiling(32, 8, at_once).shared(tiles_of(*keys)) for at_once in (0, 132))
    assert longest(whole, 8, 132) >= least * longest(cut, 8, 132)


def test_tiles_that_fill_the_card_stay_whole() -> None:
    found = Tiling(32, 8, 132).shared(tiles_of(*[(0, 18_000 + 32 * n) for n in range(64)]))
    assert len(found) == 64
    assert not found[:, 5].any()


def test_short_tiles_stay_whole_and_the_longest_come_first() -> None:
    found = Tiling(32, 8, 132).shared(tiles_of((0, 40), (0, 300), (0, 128)))
    assert found[:, 0].tolist() == [1, 0, 2]
    assert not found[:, 5].any()


def test_inputs_of_the_smallest_graph_have_room_for_all_pieces() -> None:
    """A tile of one KV head is one thread block, so many pieces are worth it."""
    found = Tiling(128, 1, 132).shared(tiles_of(*[(0, 30_000 + n) for n in range(60)]))
    assert 60 < len(found) <= 256


def single_rows(streams: int, keys: int, prompts: int, before: int, at_once: int = 132) -> set[int]:
    """Return the most single rows of streams of Llama 8B after many keys, beside 17 with few keys
    and prompts of 510 rows after others.
    """
    counts = [1] * (streams + 17) + [510] * prompts
    seen = [keys] * streams + [100] * 17 + [before + 510] * prompts
    both = (np.array(each, np.int32) for each in (counts, seen))
    found = Tiling(32, 8, at_once).few_rows(*both, max_rows=2048)
    assert set(found[streams:].tolist()) == {8}
    return set(found[:streams].tolist())


@pytest.mark.parametrize(
    ("streams", "keys", "prompts", "before", "in_tiles"),
    [
        (2, 20_000, 1, 1_000, True),  # 15.6 ms in tiles, 17.7 without, on an H100
        (2, 20_000, 1, 5_000, True),  # 18.4, 20.0
        (2, 20_000, 4, 500, False),  # 54, 48
        (6, 8_700, 2, 8_700, False),  # 36.1, 34.4
        (15, 8_700, 1, 8_700, False),  # 25.2, 22
        (2, 2_000, 1, 0, False),
    ],
)
def test_rows_with_many_keys_are_read_in_tiles_where_the_step_ends_sooner(
    streams: int, keys: int, prompts: int, before: int, in_tiles: bool
) -> None:
    assert single_rows(streams, keys, prompts, before) == {0 if in_tiles else 8}
    assert single_rows(streams, keys, prompts, before, at_once=0) == {8}, "no keys are shared"


@pytest.mark.parametrize(("max_rows", "in_tiles"), [(2048, True), (1024, False)])
def test_single_rows_take_no_tile_of_a_prompt(max_rows: int, in_tiles: bool) -> None:
    counts, keys = np.array([1, 1, *163 * [9]]), np.full(165, 20_000)
    tiling = Tiling(32, 4, 132)
    assert (tiling.room(max_rows) >= len(counts)) == in_tiles
    found = tiling.few_rows(counts, keys, max_rows)
    assert set(found[:2].tolist()) == {0 if in_tiles else 8}
