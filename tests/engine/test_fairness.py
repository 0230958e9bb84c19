"""A long prompt does not hold up those who are being answered, nor one who asks something short.

Work is counted: each row and chunk of a step costs so much, whatever the clock says.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from quire.core.config import EngineConfig
from quire.core.request import GrammarSpec, Request, SamplingParams
from quire.demo import MODEL_DIR
from quire.engine.engine import Engine
from quire.engine.factory import open_engine
from quire.scheduler.prefill_budget import PrefillBudget

LONG, SHORT = 2000, 12
STEP_S, CHUNK_S, TOKEN_S = 10e-3, 1e-3, 1e-4
"""Seconds of a step that generates, and what a prompt's chunk and token add to it."""


class Counted(PrefillBudget):
    """Learns from what steps cost by the numbers above, and keeps it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.costs: list[float] = []

    def observe(
        self,
        decode_rows: int,
        chunks: int,
        prompt_rows: int,
        seconds: float,
        *,
        keys: int = 0,
        graphed: bool = False,
    ) -> None:
        cost = STEP_S * (decode_rows > 0) + CHUNK_S * chunks + TOKEN_S * prompt_rows
        self.costs.append(cost)
        super().observe(decode_rows, chunks, prompt_rows, cost, keys=keys, graphed=graphed)


@pytest.fixture(scope="module")
def opened() -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.engine.engine.PrefillBudget", Counted)
        engine = open_engine(EngineConfig(str(MODEL_DIR), prefix_cache=False, speculate="off"))
    yield engine
    engine.close()


@pytest.fixture
def engine(opened: Engine) -> Iterator[Engine]:
    """Yield an idle engine, whose requests end with the test."""
    yield opened
    for name in ("stream", "long", "free", "bound"):
        opened.abort(name)
    while opened.has_work:
        opened.step()


def asked(
    engine: Engine, name: str, tokens: int, most: int, grammar: GrammarSpec | None = None
) -> None:
    prompt = tuple(random.Random(name).randrange(300, 3000) for _ in range(tokens))
    greedy = SamplingParams(temperature=0)
    engine.add(Request(name, prompt, greedy, max_tokens=most, grammar=grammar))


def stepped(engine: Engine) -> tuple[float, set[str]]:
    """Run a step; return its cost, and the requests that got a token."""
    outputs = engine.step()
    budget = engine._scheduler.prefill_budget
    assert isinstance(budget, Counted)
    costs, budget.costs = budget.costs, []
    return sum(costs), {each.request_id for each in outputs if each.token_ids}


def until(engine: Engine, name: str) -> list[tuple[float, set[str]]]:
    """Run steps until one yields a token for `name`; return each step's cost and receivers."""
    steps = [stepped(engine)]
    while name not in steps[-1][1]:
        steps.append(stepped(engine))
    return steps


def test_a_long_prompt_holds_nobody_up(engine: Engine) -> None:
    asked(engine, "alone", SHORT, 1)
    idle = sum(cost for cost, _ in until(engine, "alone"))

    asked(engine, "stream", SHORT, 5000)
    until(engine, "stream")
    usual = median(stepped(engine)[0] for _ in range(10))

    asked(engine, "long", LONG, 1)
    reading = [stepped(engine) for _ in range(8)]
    asked(engine, "short", SHORT, 1)
    first = until(engine, "short")
    rest = until(engine, "long")

    everything = reading + first + rest
    assert all("stream" in tokens for _, tokens in everything)
    assert max(cost for cost, _ in everything) < 3 * usual
    assert sum(cost for cost, _ in first) < 4.1 * max(idle, usual), (
        "more than two steps with chunks"
    )
    assert len(rest) > len(first), "the short request came too late to see the reading"


@pytest.mark.parametrize("bound", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_token_waits_as_long_for_a_chunk_whether_a_grammar_binds_it_or_not(
    engine: Engine, bound: bool
) -> None:
    asked(engine, "warm", LONG, 1)
    until(engine, "warm")
    grammar = GrammarSpec("regex", "[a-z]{400,800}") if bound else None
    asked(engine, "stream", SHORT, 600, grammar)
    until(engine, "stream")
    asked(engine, "long", LONG, 1)
    waits = [sum(cost for cost, _ in until(engine, "stream")) for _ in range(30)]
    assert max(waits) < 2.3 * STEP_S
    assert median(waits) > 1.5 * STEP_S, "no prompt was read beside the stream"


def test_a_bound_row_gets_a_token_of_every_step(engine: Engine) -> None:
    """A bound row's mask follows from the token before, and is made while the next step runs."""
    for name, grammar in (("free", None), ("bound", GrammarSpec("regex", "[a-z]{400,800}"))):
        asked(engine, name, SHORT, 200, grammar)
    until(engine, "bound")
    assert all(stepped(engine)[1] == {"free", "bound"} for _ in range(40))
