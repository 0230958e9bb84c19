"""Prompts share the token budget of a step."""

from __future__ import annotations

import pytest

from quire.scheduler.prefill_split import PrefillSplit, split


@pytest.mark.parametrize(
    ("budget", "wants", "shares"),
    [
        (100, [4000], [100]),
        (100, [4000, 20], [80, 20]),
        (100, [4000, 3000], [50, 50]),
        (100, [30, 3000], [30, 70]),
        (100, [4000, 3000, 20], [50, 30, 20]),
        (20, [4000, 3000], [20, 0]),
        (20, [4000, 3], [17, 3]),
        (0, [4000, 3], [0, 0]),
        (10, [], []),
    ],
)
def test_half_by_age_and_half_by_shortness(
    budget: int, wants: list[int], shares: list[int]
) -> None:
    assert split(budget, wants) == shares


@pytest.mark.parametrize(
    ("budget", "wants", "shares"),
    [
        (100, [4000, 20], [80, 20]),
        (100, [30, 3000], [30, 70]),
        (4, [4000, 12], [0, 4]),
        (4, [4000, 3], [1, 3]),
        (4, [12, 4000], [4, 0]),
        (4, [4000, 12, 8], [0, 0, 4]),
    ],
)
def test_short_first(budget: int, wants: list[int], shares: list[int]) -> None:
    assert split(budget, wants, short_first=True) == shares


def test_the_oldest_prompt_waits_for_only_so_many_tokens() -> None:
    shares = PrefillSplit()
    taken = 0
    while (got := shares.split(8, [4000, 200], 2000))[0] == 0:
        taken += got[1]
        assert taken <= 1000, "starved"
    assert taken >= 256


def test_patience_is_whole_again_once_the_oldest_is_alone() -> None:
    shares = PrefillSplit()
    while shares.split(8, [4000, 200], 2000)[0] == 0:
        pass
    shares.split(8, [4000], 2000)
    assert shares.split(8, [4000, 200], 2000)[0] == 0


@pytest.mark.parametrize(
    ("room", "wants", "shares"),
    [
        (2000, [4000, 12], [0, 12]),
        (2000, [4000, 16], [0, 16]),
        (10, [4000, 12], [0, 10]),
        (2000, [12], [12]),
        (2000, [4000, 40], [0, 4]),
    ],
)
def test_a_small_rest_is_read_to_its_end(room: int, wants: list[int], shares: list[int]) -> None:
    assert PrefillSplit().split(4, wants, room) == shares


def test_no_budget_reads_nothing() -> None:
    assert PrefillSplit().split(0, [12], 2000) == [0]
