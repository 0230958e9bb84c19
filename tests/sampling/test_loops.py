"""Loops are found in the very step that completes them, and nothing else is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling.loops import LoopDetector, loop_detector


def first_find(tokens: list[int], detector: LoopDetector) -> tuple[int, int] | None:
    """Return (how many tokens it took, the cycle) of the first find."""
    for i, token in enumerate(tokens):
        if cycle := detector.push(token):
            return i + 1, cycle
    return None


def shortest_cycle(tokens: list[int], repeats: int, least: int, longest: int) -> int | None:
    """Return the cycle by its definition: each of the last tokens equals the one a cycle before."""
    for cycle in range(1, longest + 1):
        length = max(repeats * cycle, least)
        tail = tokens[-length:]
        if len(tail) == length and all(tail[i] == tail[i - cycle] for i in range(cycle, length)):
            return cycle
    return None


def text(length: int) -> list[int]:
    return random.Random(length).choices(range(1000, 50000), k=length)


@pytest.mark.parametrize("cycle", [1, 2, 3, 7, 30, 64, 65, 200])
@pytest.mark.parametrize("repeats", [3, 4, 10])
def test_a_loop_is_found_when_its_last_token_arrives(cycle: int, repeats: int) -> None:
    before, body = text(50), list(range(cycle))
    needed = max(repeats * cycle, 40)
    found = first_find(before + body * 50, LoopDetector(repeats, 40, 200))
    assert found == (50 + needed, cycle)


def test_a_loop_from_the_first_token_is_found() -> None:
    assert first_find([0] * 100, LoopDetector(3, 20)) == (20, 1)


@pytest.mark.parametrize("cycle", [2, 31, 100])
def test_one_repeat_less_is_no_loop(cycle: int) -> None:
    body = list(range(cycle))
    tokens = text(50) + body * 4 + body[:-1] + text(60)
    assert first_find(tokens, LoopDetector(5, 10)) is None


@pytest.mark.parametrize("cycle", [2, 31, 100])
def test_one_token_that_differs_is_no_loop(cycle: int) -> None:
    tokens = text(30)
    for i in range(20):
        tokens += [*range(cycle - 1), 500 + i]
    assert first_find(tokens, LoopDetector(3, 10)) is None


def test_a_list_that_counts_is_no_loop() -> None:
    tokens = [token for i in range(200) for token in (1, 2, 500 + i, 3)]
    assert first_find(tokens, LoopDetector(3, 10)) is None


def test_short_natural_repeats_pass() -> None:
    ruler, blank_lines, zeros = [45] * 80, [10] * 12, [48, 44] * 60
    tokens = text(20) + ruler + text(9) + blank_lines + text(5) + zeros + text(7)
    assert first_find(tokens, LoopDetector(4)) is None


def test_cycles_longer_than_asked_for_are_left() -> None:
    assert first_find(list(range(9)) * 30, LoopDetector(3, 10, max_cycle=8)) is None
    assert first_find(list(range(8)) * 30, LoopDetector(3, 10, max_cycle=8)) == (24, 8)


def test_a_cycle_that_repeats_within_itself_is_found_whole() -> None:
    ruler = [0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0, 4]
    assert first_find(text(20) + ruler * 10, LoopDetector(4, 10)) == (20 + 64, 16)


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 7)),
        min_size=1,
        max_size=10,
    ),
    repeats=st.integers(3, 5),
    least=st.sampled_from([1, 6, 20]),
    longest=st.sampled_from([1, 5, 8, 16]),
)
def test_after_each_token_it_says_what_the_definition_says(
    parts: list[tuple[list[int], int]], repeats: int, least: int, longest: int
) -> None:
    detector, tokens = LoopDetector(repeats, least, longest), []
    for token in [token for body, times in parts for token in body * times]:
        tokens.append(token)
        assert detector.push(token) == shortest_cycle(tokens, repeats, least, longest)


def test_fewer_repeats_than_can_be_seen_are_refused() -> None:
    with pytest.raises(ValueError, match="3"):
        LoopDetector(2)


def test_bound_answers_are_watched_unless_somebody_says_otherwise() -> None:
    free, off = loop_detector(None, bound=False), loop_detector(0, bound=True)
    assert (free, off) == (None, None)
    default, asked = loop_detector(None, bound=True), loop_detector(4, bound=False)
    assert default is not None
    assert asked is not None
    assert first_find([7] * 600, default) == (512, 1)
    assert first_find([7] * 600, asked) == (128, 1)
