"""Speculation beside many streams, on devices whose step times were measured: it never costs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.core.request import Request
from quire.scheduler.drafts import Draft, DraftQuery
from tests.scheduler.timed_streams import Oracle, TimedStreams

MIXTURE = {1: 2.11, 2: 2.16, 4: 2.24, 8: 2.46, 16: 3.18, 32: 4.95, 64: 6.6, 128: 9.95, 256: 13.6}
"""Milliseconds of a step by its rows: Gemma 4 26B-A4B in 4 bits on an H100."""
EVEN_EXPERTS = {1: 1.79, 2: 2.56, 4: 3.08, 6: 3.52, 8: 3.89, 9: 4.45, 16: 5.37, 24: 6.76, 32: 7.27}
"""The same where each row meets other experts."""
SAME_EXPERTS = {1: 1.79, 2: 2.56, 4: 2.9, 8: 2.95, 16: 3.0, 32: 3.1, 64: 3.2}
"""The same as if rows met the same experts."""
PACKED_EXPERTS = {1: 1.52, 2: 2.07, 4: 2.72, 6: 3.19, 8: 3.55, 9: 3.9, 16: 5.2, 24: 6.15, 32: 6.64}
"""The same, later in that session."""
CHEAP = {1: 2.1, 32: 2.6, 64: 4.0, 128: 7.0, 256: 12.0}
"""Step times in milliseconds by rows, as if weights were read once for 32 rows."""


def host(sequences: int, rows: int) -> float:
    """Return milliseconds of planning and launching, as measured beside `MIXTURE`."""
    return 0.7 + 0.03 * sequences + 0.004 * rows


def gain(
    step_ms: dict[int, float], rate: float, streams: int, tokens: int, host_factor: float = 1.0
) -> float:
    """Return the tokens per second of a second load with speculation, divided by those without."""
    on, off = (
        TimedStreams(
            step_ms,
            lambda sequences, rows: host_factor * host(sequences, rows),
            Oracle(lambda number: rate) if speculates else None,
        )
        for speculates in (True, False)
    )
    on.serve(streams, tokens)
    return on.serve(streams, tokens, first=1000) / off.serve(streams, tokens)


@pytest.mark.parametrize(
    ("rate", "streams", "tokens"),
    [(0.7, 8, 100), (0.7, 32, 30), (0.4, 1, 100), (0.05, 8, 20)],
)
def test_speculation_that_does_not_pay_switches_itself_off(
    rate: float, streams: int, tokens: int
) -> None:
    assert gain(MIXTURE, rate, streams, tokens) >= 0.97


@pytest.mark.parametrize(("streams", "least"), [(1, 1.8), (8, 1.4)])
def test_speculation_pays_where_rows_are_cheap(streams: int, least: float) -> None:
    assert gain(CHEAP, 0.7, streams, tokens=100, host_factor=0.5) >= least


@pytest.mark.parametrize(("streams", "least"), [(1, 1.2), (8, 1.12)])
def test_steps_that_take_longer_than_at_the_start_are_soon_believed(
    streams: int, least: float
) -> None:
    """With five drafts a step, one stream would gain 1.31; with three each, eight 1.24."""
    off = TimedStreams(EVEN_EXPERTS, lambda sequences, rows: 0.0, None).serve(streams, 150)
    times = []
    for number in range(16 // streams + 2):
        on = TimedStreams(
            EVEN_EXPERTS,
            lambda sequences, rows: 0.42 + 0.03 * sequences,
            Oracle(lambda number: 0.7),
        )
        for rows, seconds in SAME_EXPERTS.items():
            for _ in range(5):
                on.budget.observe(rows, 0, 0, seconds)
        on.serve(streams, 150, first=1000 * number)
        times.append(1 / on.serve(streams, 150, first=1000 * number + 500))
    assert len(times) / sum(times) / off >= least


@pytest.mark.parametrize(
    ("rate", "streams", "least"), [(0.7, 1, 1.3), (0.7, 8, 1.2), (0.2, 8, 0.97)]
)
def test_drafts_behind_tokens_that_are_not_read_wait_for_no_host(
    rate: float, streams: int, least: float
) -> None:
    """Read first, drafts of which 0.7 are right gain 1.08 at one stream, and 1.13 at eight."""
    off = TimedStreams(PACKED_EXPERTS, lambda sequences, rows: 0.0, None).serve(streams, 150)
    times = []
    for number in range(3):
        on = TimedStreams(
            PACKED_EXPERTS,
            lambda sequences, rows: 0.45 + 0.07 * sequences,
            Oracle(lambda number: rate),
            follows=True,
        )
        on.serve(streams, 150, first=1000 * number)
        times.append(1 / on.serve(streams, 150, first=1000 * number + 500))
    assert len(times) / sum(times) / off >= least


def test_a_stream_that_hits_is_drafted_beside_those_that_do_not() -> None:
    streams = TimedStreams(CHEAP, host, Oracle(lambda number: 0.95 if number == 0 else 0.0))
    streams.serve(8, 100)
    assert 5 <= streams.drafted <= 20  # then its answer is complete


class _AskedInVain(Oracle):
    """Is never right, and takes time on the host to say so."""

    def __init__(self, asking_s: float) -> None:
        super().__init__(lambda number: 0.0)
        self.asking_s, self.asked, self.queries = asking_s, 0, 0
        self.streams: TimedStreams | None = None

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft | None]:
        assert self.streams is not None
        self.asked += 1
        self.queries += len(queries)
        self.streams.time += self.asking_s
        return super().propose(queries)


@pytest.mark.parametrize(("asking_s", "most"), [(0.3e-3, 0.1), (0.01e-3, 1.0)])
def test_asking_in_vain_takes_little_of_short_steps(asking_s: float, most: float) -> None:
    """Drafters are asked at each step only where that takes next to nothing of it."""
    oracle = _AskedInVain(asking_s)
    streams = TimedStreams({1: 1e-3, 64: 2e-3}, lambda sequences, rows: 0.0, oracle)
    oracle.streams = streams
    streams.serve(8, 2000)
    assert oracle.asked < 2.5 * most * streams.steps
    assert most < 1.0 or oracle.asked > 0.9 * streams.steps


def test_another_answer_is_asked_for_at_once() -> None:
    """However long drafters were to be left alone after they had nothing for others."""
    oracle = _AskedInVain(0.3e-3)
    streams = TimedStreams({1: 1e-3, 64: 2e-3}, lambda sequences, rows: 0.0, oracle)
    oracle.streams = streams
    asked: list[int] = []
    for number in range(20):
        streams.serve(1, 16, first=number)
        asked.append(oracle.asked)
    assert sorted(set(asked)) == asked, "each answer of 16 tokens was asked for"


def test_an_answer_is_asked_for_at_each_of_its_first_tokens() -> None:
    """What it repeats is found from its fourth token on."""
    oracle = _AskedInVain(0.3e-3)
    streams = TimedStreams({1: 1e-3, 64: 2e-3}, lambda sequences, rows: 0.0, oracle)
    oracle.streams = streams
    for number in range(20):
        before = oracle.asked
        streams.serve(1, 6, first=number)
        assert oracle.asked - before >= 4


def test_an_answer_that_begins_is_asked_for_without_its_neighbours() -> None:
    """Answers begin one after the other, as those of many clients do."""
    oracle = _AskedInVain(0.3e-3)
    streams = TimedStreams({1: 1e-3, 64: 2e-3}, lambda sequences, rows: 0.0, oracle)
    oracle.streams = streams
    for number in range(200):
        streams.add(Request(str(number), (0,), max_tokens=64))
        streams.step()
        streams.step()
    assert 200 <= oracle.queries < 5 * 200


LLAMA = {1: 2.1, 8: 2.5, 32: 3.9, 64: 5.1, 128: 6.7, 256: 10.1, 512: 14.0, 1024: 21.0, 2048: 36.0}
"""Milliseconds of a step by its rows: Llama 8B in 4 bits on an H100."""


def last_first_token(rate: float | None, requests: int = 96) -> float:
    """Return when the last of many requests, which come 0.8 ms apart, gets its first token.

    Args:
        rate: probability that a draft is right; None without speculation.
    """
    oracle = None if rate is None else Oracle(lambda number: rate)
    streams = TimedStreams({rows: ms / 1e3 for rows, ms in LLAMA.items()}, _host_s, oracle, 0.06)
    waiting = list(range(requests))
    while waiting or any(not each.progress.generated for each in streams.scheduler.running):
        while waiting and waiting[0] * 0.8e-3 <= streams.time:
            number = waiting.pop(0)
            prompt = tuple(1000 * number + place for place in range(128))
            streams.add(Request(str(number), prompt, max_tokens=64))
        streams.step()
        if waiting and not streams.scheduler.has_work:
            streams.time = waiting[0] * 0.8e-3
    return streams.time


def _host_s(sequences: int, rows: int) -> float:
    return host(sequences, rows) / 1e3


def test_drafts_that_always_hit_hold_up_no_prompts() -> None:
    assert last_first_token(rate=0.95) < 1.45 * last_first_token(rate=None)
