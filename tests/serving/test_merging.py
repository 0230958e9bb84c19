"""Joining the pieces that wait for a slow reader."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.request import TokenLogprobs
from quire.serving.merging import merge
from quire.text.events import (
    Event,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
)
from tests.support.folding import fold

pieces = st.text(max_size=3)
logprobs = st.lists(st.builds(TokenLogprobs, st.integers(0, 9), st.just(-1.0)), max_size=2)
call = st.integers(0, 3).flatmap(
    lambda size: st.lists(pieces, min_size=size, max_size=size).map(
        lambda parts: [*(ToolCallArguments(0, part) for part in parts)]
    )
)
plain = st.one_of(
    st.builds(Text, pieces, logprobs.map(tuple)).map(lambda event: [event]),
    st.builds(Reasoning, pieces, logprobs.map(tuple)).map(lambda event: [event]),
    call.map(lambda parts: [ToolCallStarted(0, "id", "f"), *parts, ToolCallEnded(0)]),
)
events = st.lists(plain, max_size=12).map(lambda groups: [e for group in groups for e in group])


@given(events)
def test_what_is_joined_spells_the_same(events: list[Event]) -> None:
    joined = merge(events)
    assert fold(joined) == fold(events)
    assert all(type(one) is not type(two) for one, two in pairwise(joined))


def test_arguments_of_different_calls_stay_apart() -> None:
    parts: list[Event] = [ToolCallArguments(0, "{"), ToolCallArguments(1, "{")]
    assert merge(parts) == parts


@pytest.mark.timeout(60)
def test_joining_takes_linear_time() -> None:
    (joined,) = merge([Text("word ")] * 1_000_000)
    assert isinstance(joined, Text)
    assert joined.text == "word " * 1_000_000
