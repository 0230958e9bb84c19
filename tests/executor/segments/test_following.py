"""Steps that follow drafts which the host has not read have the answers of steps without drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams, TokenLogprobs
from quire.demo import MODEL_DIR
from quire.device.device import current_device, open_device
from quire.engine.assembly import assemble
from quire.engine.draft_opening import open_drafters
from quire.executor.factory import open_executor
from quire.executor.segments.executor import SegmentExecutor
from quire.executor.segments.runner import open_segments
from quire.models.weights.loader import LoadedModel, open_model
from quire.scheduler.draft_lengths import Candidate, EveryDraft
from quire.scheduler.drafts import Draft, Drafter, DraftQuery, LookupDrafter
from quire.scheduler.plan import StepPlan
from quire.speculation.heads import HeadDrafter
from tests.support.everyday import everyday

CONFIG = EngineConfig(str(MODEL_DIR), kv_memory=64 << 20, prefix_cache=False)
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "drawn": SamplingParams(temperature=0.8, top_p=0.95, seed=3),
    "logprobs": SamplingParams(temperature=1.2, top_k=20, seed=4, logprobs=2),
    "biased": SamplingParams(temperature=0, logit_bias=((300, 2.0),)),
    "penalised": SamplingParams(temperature=0, presence_penalty=0.4),
}


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    open_device("auto", threads=1)
    if current_device().kernels is None:
        pytest.skip("only the compiled kernels place rows on the device")
    yield open_model(str(MODEL_DIR))
    open_device("auto")


Answer = tuple[list[int], list[TokenLogprobs]]


class Expected(LookupDrafter):
    """Expects what requests get, but for some tokens, from the first unread one on."""

    name = "expected"
    looks_ahead = True

    def __init__(self, plain: Mapping[str, Answer]) -> None:
        self._answers = {name: tokens for name, (tokens, _) in plain.items()}
        self._dice = random.Random(6)

    def draft(self, query: DraftQuery) -> Draft:
        answer = self._answers[query.request.id]
        rest = answer[len(query.tokens) - len(query.request.prompt) :][: query.limit]
        wrong = [self._dice.random() < 0.2 for _ in rest]
        return Draft(
            tuple(token ^ off for token, off in zip(rest, wrong, strict=True))[:8], self.name
        )


class LikelyDrafts(EveryDraft):
    """Verifies the drafts that are at least as likely as is asked for."""

    def __init__(self, least: float) -> None:
        self._least = least

    def least_chance(
        self, candidates: Sequence[Candidate], lengths: Sequence[int], rows: int
    ) -> float:
        return self._least


DRAFTERS = ("head", "expected", "both")


class Follows:
    """Counts plans whose rows follow drafts, those of them that were built ahead, and the rows that
    were left out.
    """

    def __init__(self) -> None:
        self.plans = self.ahead = self.left_out = 0


def answers(
    loaded: LoadedModel,
    requests: list[Request],
    plain: Mapping[str, Answer] | None = None,
    drafters: str = "head",
    least_chance: float = 0.0,
) -> tuple[dict[str, Answer], Follows]:
    """Return answers, and how many steps followed drafts.

    Args:
        plain: the answers without drafts; None for no drafters.
        least_chance: see `StepPlan`.
    """
    config, own = replace(CONFIG, speculate="off"), list[Drafter]()
    guesser = None
    if plain is not None:
        config = replace(CONFIG, speculate="auto")
        if drafters != "head":
            own.append(Expected(plain))
        if drafters != "expected":
            own.append(HeadDrafter())
            guesser = open_drafters(loaded, replace(config, speculate="mtp")).guesser
    opener = partial(open_executor, segments=open_segments(loaded.model))
    lengths = LikelyDrafts(least_chance)
    engine = assemble(loaded, config, None, own, lengths, guesser=guesser, open_executor=opener)
    executor, counted = engine._executor, Follows()
    assert isinstance(executor, SegmentExecutor)
    follows = executor._follows

    def watched(plan: StepPlan) -> bool:
        ahead = bool(follows(plan))
        counted.plans, counted.ahead = counted.plans + 1, counted.ahead + ahead
        return ahead

    executor._follows = watched
    if (head := engine._head) is not None:
        left_out = head.left_out

        def left(plan: StepPlan) -> int:
            rows = left_out(plan)
            counted.left_out += rows
            return rows

        head.left_out = left  # type: ignore[method-assign]
    found: dict[str, Answer] = {each.id: ([], []) for each in requests}
    for each in requests:
        engine.add(each)
    while engine.has_work:
        for output in engine.step():
            tokens, logprobs = found[output.request_id]
            tokens += output.token_ids
            logprobs += output.logprobs
    engine.close()
    return found, counted


def request(name: str, sampling: SamplingParams) -> Request:
    """Return a request of text that repeats, so that the head is right now and then."""
    prompt = (*range(200, 212), *range(200, 212), *range(200, 206 + len(name) % 5))
    return Request(name, prompt, sampling, max_tokens=130)


@pytest.mark.parametrize(
    ("kind", "drafters"),
    everyday(product(KINDS, DRAFTERS), lambda kind, own: own == "both" or kind == "greedy"),
)
def test_one_stream_is_planned_ahead_of_its_drafts(
    loaded: LoadedModel, kind: str, drafters: str
) -> None:
    """Beyond the window of 96 tokens, and with drafts of which some are wrong."""
    asked = [request("r", KINDS[kind])]
    plain, _ = answers(loaded, asked)
    drafted, counted = answers(loaded, asked, plain, drafters)
    assert drafted == plain
    if kind == "penalised":
        assert counted.plans == 0
    else:
        assert counted.ahead > 20
        assert counted.plans - counted.ahead < 4  # steps of few rows are held against the model


@pytest.mark.parametrize("drafters", everyday(DRAFTERS, lambda own: own == "both"))
def test_streams_with_drafts_of_several_kinds_are_planned_ahead_together(
    loaded: LoadedModel, drafters: str
) -> None:
    asked = [request(name, KINDS[name]) for name in ("greedy", "drawn", "logprobs")]
    plain, _ = answers(loaded, asked)
    drafted, counted = answers(loaded, asked, plain, drafters)
    assert drafted == plain
    assert counted.ahead > 20


@pytest.mark.parametrize("drafters", everyday(DRAFTERS, lambda own: own == "both"))
def test_rows_that_are_many_follow_once_the_drafts_are_read(
    loaded: LoadedModel, drafters: str
) -> None:
    asked = [request(f"{number} greedy", KINDS["greedy"]) for number in range(6)]
    plain, _ = answers(loaded, asked)
    drafted, counted = answers(loaded, asked, plain, drafters)
    assert drafted == plain
    assert counted.plans - counted.ahead > 20


@pytest.mark.parametrize("names", [("drawn",), ("greedy", "drawn", "logprobs")])
def test_rows_of_unlikely_guesses_are_left_out(loaded: LoadedModel, names: Sequence[str]) -> None:
    asked = [request(name, KINDS[name]) for name in names]
    plain, _ = answers(loaded, asked)
    every, steps = answers(loaded, asked, plain)
    likely, fewer = answers(loaded, asked, plain, least_chance=0.35)
    assert likely == every == plain
    assert steps.left_out == 0
    assert fewer.left_out > fewer.ahead / 2
    none, counted = answers(loaded, asked, plain, least_chance=1.1)
    assert none == plain
    assert counted.left_out > 3 * counted.ahead
