"""Steps that are launched before their drafts' places are read have the answers without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.engine.assembly import assemble
from quire.executor.graphs.executor import GraphExecutor
from quire.models.weights.loader import LoadedModel
from quire.scheduler.draft_lengths import EveryDraft
from quire.scheduler.drafts import Draft, DraftQuery, LookupDrafter
from quire.scheduler.plan import StepPlan
from tests.executor.graphs.recorded import opened
from tests.executor.graphs.test_recording import FAMILIES
from tests.support.emulated_card import emulate_card
from tests.support.emulated_metal import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

CONFIG = EngineConfig(
    "", kv_memory=64 << 20, prefix_cache=False, batch_invariant=True, speculate="off"
)
"""Tokens of other numbers of rows are the same to the bit."""
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=3)
Wrong = Callable[[random.Random], bool]
DRAFTERS: Mapping[str, Wrong] = {
    "right": lambda dice: False,
    "lying": lambda dice: True,
    "random": lambda dice: dice.random() < 0.4,
}


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_card(monkeypatch)


class Scripted(LookupDrafter):
    """Knows what requests get, and is wrong by the throw of a die."""

    name = "scripted"
    looks_ahead = True

    def __init__(self, answers: Mapping[str, Sequence[int]], wrong: Wrong) -> None:
        self._answers, self._wrong, self._dice = answers, wrong, random.Random(5)

    def draft(self, query: DraftQuery) -> Draft | None:
        answer = self._answers.get(query.request.id, ())
        rest = answer[len(query.tokens) - len(query.request.prompt) :][: query.limit]
        guesses = tuple(token ^ self._wrong(self._dice) for token in rest)
        return Draft(guesses[:3], self.name) if guesses else None


class Plans:
    """Counts plans whose rows follow drafts, and those of them that were launched ahead."""

    def __init__(self) -> None:
        self.following = self.ahead = 0


def answers(
    loaded: LoadedModel, asked: Sequence[Request], drafters: Sequence[Scripted] = ()
) -> tuple[dict[str, list[int]], Plans]:
    config = replace(CONFIG, speculate="auto" if drafters else "off")
    engine = assemble(loaded, config, None, drafters, EveryDraft())
    executor, counted = engine._executor, Plans()
    assert isinstance(executor, GraphExecutor)
    follows = executor._follows

    def watched(plan: StepPlan) -> bool:
        ahead = follows(plan)
        counted.following, counted.ahead = counted.following + 1, counted.ahead + ahead
        return ahead

    executor._follows = watched
    found: dict[str, list[int]] = {each.id: [] for each in asked}
    for each in asked:
        engine.add(each)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found[output.request_id] += output.token_ids
    engine.close()
    return found, counted


def request(name: str, sampling: SamplingParams, prompt: int, tokens: int) -> Request:
    own = tuple(3 + n * 7 % 60 for n in range(prompt))
    return Request(name, own, sampling, max_tokens=tokens)


@pytest.mark.parametrize(
    "drafter",
    [each if each == "random" else pytest.param(each, marks=pytest.mark.slow) for each in DRAFTERS],
)
def test_tokens_are_those_without_drafts(drafter: str) -> None:
    """Beside a row without drafts, past the end of a block."""
    loaded = opened(FAMILIES["llama"])
    asked = [request("greedy", GREEDY, 60, 11), request("drawn", DRAWN, 5, 9)]
    asked.append(replace(request("plain", GREEDY, 9, 5), speculation="off"))
    plain, _ = answers(loaded, asked)
    known = {name: plain[name] for name in ("greedy", "drawn")}
    found, plans = answers(loaded, asked, [Scripted(known, DRAFTERS[drafter])])
    assert found == plain
    assert plans.ahead > 2
