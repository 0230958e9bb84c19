"""The loads that every system is given, and how their times are taken. Pure Python.

A system takes requests between steps, and returns each step's new tokens. It runs in the process
that measures it, without HTTP.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from workload import LONG, drawn

Row = dict[str, Any]

PICTURE = (1024, 768)
"""Width and height of pictures, in pixels."""
PICTURE_ROWS = 266
"""Rows of such a picture in Gemma 4, without the tokens that mark its start and end."""
AROUND = 16
"""Tokens before a picture, and after it."""
PICTURES = (1, 8, 32)
SESSIONS, TURNS = 16, 10
SHARED, QUESTION, ANSWER = 8000, 600, 120
"""Tokens of the prompt that all sessions share, and of each turn's question and answer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request.

    Attributes:
        picture: seed of a picture of `PICTURE` pixels, which stands after the first `AROUND`
            tokens of the prompt; None for text alone.
    """

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    picture: int | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """A step's output for one request: new tokens, and whether they are the last ones."""

    name: str
    tokens: Sequence[int]
    done: bool


class System(Protocol):
    """An engine that is measured.

    Attributes:
        about: versions and settings that shape its figures.
        caches_prefixes: whether a prompt's known start is not read again.
        sees: whether it takes pictures.
    """

    about: Row
    caches_prefixes: bool
    sees: bool

    def prepare(self, asked: Asked) -> Any:
        """Return what `add` takes. Not timed: a server does it beside its engine."""
        ...

    def add(self, prepared: Any) -> None: ...

    def step(self) -> Iterable[Answered]: ...


@dataclass(slots=True)
class Times:
    """Times of a request by `time.perf_counter`: when it was added, and each step that gave it
    tokens.
    """

    added: float
    stamps: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.stamps[0][0]

    @property
    def last(self) -> float:
        return self.stamps[-1][0]


class Run:
    """Requests of one load, and the steps that answer them."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.times: dict[str, Times] = {}
        self.steps = 0

    def add(self, *requests: Asked) -> None:
        """Ask at once; the clock of all starts when they are prepared."""
        prepared = [self._system.prepare(each) for each in requests]
        for asked, own in zip(requests, prepared, strict=True):
            self.times[asked.name] = Times(time.perf_counter())
            self._system.add(own)

    def step(self) -> list[str]:
        """Run a step; return the names of the requests that it ends."""
        outputs = self._system.step()
        now = time.perf_counter()
        self.steps += 1
        for each in outputs:
            if each.tokens:
                own = self.times[each.name]
                own.stamps.append((now, len(each.tokens)))
                own.tokens += each.tokens
        return [each.name for each in outputs if each.done]


def at_once(system: System, requests: Iterable[Asked]) -> Row:
    """Ask all requests at once, run steps until they have ended, and return the figures.

    `tokens_s` counts from the last of the first tokens to the first of the last ones, while all
    generate; None if they never do. `last_tokens` is how many different last tokens the streams
    have: random weights that make all rows alike, and so use too few experts, show there.
    """
    run = Run(system)
    run.add(*requests)
    left = len(run.times)
    while left:
        left -= len(run.step())
    times = run.times.values()
    started, ended = min(each.added for each in times), max(each.last for each in times)
    first, end = max(each.first for each in times), min(each.last for each in times)
    within = sum(n for each in times for at, n in each.stamps if first < at <= end)
    whole = sum(len(each.tokens) for each in times)
    return {
        "streams": len(times),
        "seconds": round(ended - started, 3),
        "first_token_s": round(first - started, 3),
        "whole_tokens_s": round(whole / (ended - started), 1),
        "tokens_s": round(within / (end - first), 1) if end > first else None,
        "steps": run.steps,
        "last_tokens": len({each.tokens[-1] for each in times}),
    }


# -- loads -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Settings of the loads.

    Attributes:
        streams: widths of bursts.
        pictures: how many pictures are asked about at once.
        tokens: of each answer of a burst.
        rounds: how often each is run; the figures of all are given.
        long: tokens of long prompts.
        short: divides the lengths of agents' prompts, for a quick look.
    """

    streams: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    pictures: tuple[int, ...] = PICTURES
    tokens: int = 128
    rounds: int = 2
    long: int = LONG
    short: int = 1


def bursts(system: System, options: Options) -> Iterator[Row]:
    """Measure bursts of random prompts of 128 tokens."""
    for again in range(options.rounds):
        for count in options.streams:
            seeds = [100_000 * again + 1000 * count + n for n in range(count)]
            asked = [Asked(f"{seed}", drawn(128, seed), options.tokens) for seed in seeds]
            yield {"round": again, **at_once(system, asked)}


def long_prompts(system: System, options: Options) -> Iterator[Row]:
    """Measure one prompt of 20,000 tokens, then eight others at once."""
    for again in range(options.rounds):
        for count in (1, 8):
            seeds = [7_000_000 + 100 * again + 10 * count + n for n in range(count)]
            asked = [Asked(f"long {seed}", drawn(options.long, seed), 32) for seed in seeds]
            yield {"round": again, "prompt": options.long, **at_once(system, asked)}


def pictures(system: System, options: Options) -> Iterator[Row]:
    """Measure questions about one picture each, and prompts of text as long; 64 tokens answer
    each.
    """
    for again in range(options.rounds):
        for count in options.pictures:
            seeds = [8_000_000 + 1000 * again + 100 * count + n for n in range(count)]
            if system.sees:
                around = [(seed, drawn(2 * AROUND, seed)) for seed in seeds]
                asked = [Asked(f"picture {seed}", text, 64, seed) for seed, text in around]
                yield {"round": again, "pictures": True, **at_once(system, asked)}
            length = 2 * AROUND + PICTURE_ROWS + 2
            asked = [Asked(f"text {seed}", drawn(length, seed), 64) for seed in seeds]
            yield {"round": again, "pictures": False, **at_once(system, asked)}


def agents(system: System, options: Options) -> Iterator[Row]:
    """Measure sessions that share a long prompt and read a tool's result before each answer, turn
    by turn.
    """
    if not system.caches_prefixes:
        return
    for again in range(options.rounds):
        yield {"round": again, **_sessions(system, again, options.short)}


def _sessions(system: System, again: int, short: int) -> Row:
    run = Run(system)
    shared = drawn(SHARED // short, 9_000_000 + again)
    prompts = {
        session: shared + drawn(QUESTION // short, 9_100_000 + 1000 * again + session)
        for session in range(SESSIONS)
    }

    def ask(session: int, turn: int) -> None:
        run.add(Asked(f"{again} {session} {turn}", prompts[session], max(2, ANSWER // short)))

    for session in range(SESSIONS):
        ask(session, 0)
    left = SESSIONS * TURNS
    while left:
        for name in run.step():
            left -= 1
            session, turn = map(int, name.split()[1:])
            if turn + 1 == TURNS:
                continue
            seed = 9_200_000 + 100_000 * again + 1000 * turn + session
            prompts[session] += (*run.times[name].tokens, *drawn(QUESTION // short, seed))
            ask(session, turn + 1)
    times = run.times.values()
    started, ended = min(each.added for each in times), max(each.last for each in times)
    waits = sorted(each.first - each.added for each in times)
    return {
        "sessions": SESSIONS,
        "turns": TURNS,
        "seconds": round(ended - started, 3),
        "first_token_mean_s": round(statistics.fmean(waits), 3),
        "first_token_p95_s": round(waits[int(0.95 * len(waits))], 3),
        "whole_tokens_s": round(sum(len(each.tokens) for each in times) / (ended - started), 1),
        "steps": run.steps,
    }


LOADS: dict[str, Callable[[System, Options], Iterator[Row]]] = {
    "bursts": bursts,
    "long": long_prompts,
    "pictures": pictures,
    "agents": agents,
}
