from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import RequestError
from quire.text.stops import StopMatcher, StopStrings
from tests.support.work import counted


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """Return the text sent for each piece, the flush last, and the stop string that matched."""
    matcher = StopMatcher(StopStrings(stops))
    sent = []
    for piece in pieces:
        safe, stop = matcher.feed(piece)
        sent.append(safe)
        if stop is not None:
            return sent, stop
    return [*sent, matcher.flush()], None


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """Find the stop string with `str.find` on the whole text: the first to be complete, then the
    longest.
    """
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


# Few letters, so that stop strings overlap each other and themselves.
LETTERS = st.text("abc", max_size=60)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@given(stops=STOPS, text=LETTERS, cuts=st.lists(st.integers(0, 60)))
@settings(max_examples=600, deadline=None)
def test_as_found_in_the_whole_however_it_is_cut(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    sent, stop = run(stops, pieces)
    assert ("".join(sent), stop) == expected(stops, text)


@given(stops=STOPS, text=LETTERS)
@settings(max_examples=300, deadline=None)
def test_holds_back_no_more_than_may_be_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopMatcher(StopStrings(stops))
    sent = ""
    for position, character in enumerate(text, start=1):
        safe, stop = matcher.feed(character)
        sent += safe
        if stop is not None:
            return
        seen = text[:position]
        held = [n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])]
        assert len(seen) - len(sent) == max(held, default=0)


def test_starts_inside_a_token() -> None:
    assert run(["\nUser:"], ["Hello.", "\nUs", "er: hi"]) == (["Hello.", "", ""], "\nUser:")


def test_what_only_looked_like_one_is_sent() -> None:
    assert run(["\nUser:"], ["Hi\nUs", "age"]) == (["Hi", "\nUsage", ""], None)


def test_the_held_text_comes_at_the_end() -> None:
    assert run(["END"], ["the EN"]) == (["the ", "EN"], None)


def test_no_stop_strings_hold_nothing() -> None:
    assert run([], ["any", "thing"]) == (["any", "thing", ""], None)


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(StopStrings(["x"]))
    assert matcher.feed("axb") == ("a", "x")
    assert matcher.feed("more") == ("", "x")
    assert matcher.flush() == ""


def test_the_longest_of_several_matching_stop_strings_wins() -> None:
    assert run(["b", "ab"], ["cab"]) == (["c"], "ab")


def test_an_empty_stop_string_is_refused_by_name() -> None:
    with pytest.raises(RequestError) as refused:
        StopStrings(["a", ""])
    assert refused.value.param == "stop"


def test_linear_in_the_text_where_searching_again_would_not_be() -> None:
    calls = []
    for length in (20_000, 80_000):
        matcher = StopMatcher(StopStrings(["a" * 4_000 + "b"]))
        _, called = counted(lambda m=matcher, n=length: [m.feed("a" * 10) for _ in range(n // 10)])
        calls.append(called)
    assert calls[1] < 4 * 1.1 * calls[0]
