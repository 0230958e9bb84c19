"""Speculation: several tokens a step, and the very answer that there would be without."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.request import GrammarSpec, Request, SamplingParams, ThinkingBudget, TokenRules
from quire.demo import MODEL_DIR
from quire.executor.eager import EagerExecutor
from quire.executor.step import Drawn
from quire.models.weights.loader import LoadedModel, open_model
from quire.scheduler.draft_lengths import EveryDraft, WorthwhileDrafts
from quire.scheduler.drafting import Drafting
from quire.scheduler.drafts import Draft, DraftQuery, LookupDrafter
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step_times import StepTimes
from tests.support.everyday import everyday
from tests.support.opened import Open
from tests.support.parity import Company, Generated, assert_same, prompts
from tests.support.tiny_models import CONFIGS

FORMATS = (KVFormat(), KVFormat("page", 4, 4), KVFormat("uniform", 8, 8))
# Full attention; a recurrent state; windows and experts; layers that keep nothing themselves.
FAMILIES = ("llama", "qwen3_5", "gemma4", "gemma4_moe", "gemma4_ple")

Falsify = Callable[[random.Random], bool]
KINDS: dict[str, Falsify] = {
    "right": lambda dice: False,
    "lying": lambda dice: True,
    "random": lambda dice: dice.random() < 0.25,
}


class Scripted(LookupDrafter):
    """Knows the answers, and falsifies some of them.

    Args:
        answers: by request.
        wrong: whether the next draft is to be wrong.
    """

    name = "scripted"
    looks_ahead = False

    def __init__(self, answers: Mapping[str, Generated], wrong: Falsify, most: int = 5) -> None:
        self._answers = {name: list(each.tokens) for name, each in answers.items()}
        self._wrong = wrong
        self._most = most
        self._dice: dict[str, random.Random] = {}
        self.right = self.wrong = 0
        self.asked_together = 0

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Draft | None]:
        self.asked_together = max(self.asked_together, len(queries))
        return super().propose(queries)

    def draft(self, query: DraftQuery) -> Draft | None:
        dice = self._dice.setdefault(query.request.id, random.Random(query.request.id))
        tokens = [*query.request.prompt, *self._answers[query.request.id]]
        known = list(query.tokens)
        assert known == tokens[: len(known)], "drafts changed the answer"
        drafts = tokens[len(known) :][: min(query.limit, dice.randint(0, self._most))]
        for place in range(len(drafts)):
            if self._wrong(dice):
                drafts[place] = (drafts[place] + 1) % 250
                self.wrong += 1
            else:
                self.right += 1
        return Draft(tuple(drafts), self.name)


def run(
    loaded: LoadedModel,
    config: EngineConfig,
    wanted: list[Request],
    known: Mapping[str, Generated],
    kind: str = "random",
) -> tuple[Company, Scripted]:
    """Serves requests beside each other, with drafts of answers that are known."""
    drafter = Scripted(known, KINDS[kind])
    company = Company(loaded, config, (drafter,), EveryDraft())
    company.run(wanted, every=3)
    return company, drafter


DAILY = (
    ("gemma4_ple", "page-4", "random"),
    ("qwen3_5", "plain", "random"),
    ("llama", "plain", "lying"),
)


@pytest.mark.parametrize(
    ("family", "format", "kind"),
    everyday(
        product(CONFIGS, FORMATS, KINDS),
        lambda family, format, kind: (family, format.name, kind) in DAILY,
    ),
    ids=lambda each: getattr(each, "name", each),
)
def test_drafts_save_steps_and_change_no_token(
    opened: Open, family: str, format: KVFormat, kind: str
) -> None:
    loaded = opened(family)
    config = EngineConfig(
        str(loaded.path), kv_memory=64 << 20, kv_format=format, block_size=32, kv_skip_layers=()
    )
    # Prompts that end within a block and at its end; answers that fill blocks.
    wanted = prompts((3, 32, 40), tokens=40)
    plain = Company(loaded, config)
    plain.run(wanted, every=3)
    company, drafter = run(loaded, config, wanted, plain.answers, kind)
    assert_same(company.answers, plain.answers, [request.id for request in wanted])
    assert drafter.asked_together > 1
    assert (drafter.right > 25) is (kind != "lying")
    assert (drafter.wrong > 10) is (kind != "right")
    steps, plain_steps = company.engine.stats().steps, plain.engine.stats().steps
    if kind == "lying":
        # Recurrent states and full blocks may take a step more to catch up.
        assert steps <= 1.5 * plain_steps
    else:
        assert steps < plain_steps


def test_sequences_without_drafts_keep_the_steps_they_had(opened: Open) -> None:
    """A drafter that finds nothing costs no step, nor does a neighbour with drafts."""
    loaded = opened("llama")
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20)
    wanted = prompts((3, 40), tokens=40)
    plain = Company(loaded, config)
    plain.run(wanted)
    for most in (0, 3):
        drafter = Scripted(plain.answers, KINDS["right"], most)
        company = Company(loaded, config, (drafter,), EveryDraft())
        company.run(wanted)
        assert company.engine.stats().steps <= plain.engine.stats().steps


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_device_computes_layers_while_the_host_prepares_sampling(
    opened: Open, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device would wait, because a step is planned after the tokens of the one before are
    known.
    """
    loaded = opened("llama")
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20)
    wanted = prompts((3,), tokens=12)
    plain = Company(loaded, config).run(wanted)
    drafter = Scripted(plain, KINDS["lying"], drafts)
    company = Company(loaded, config, (drafter,) if drafts else (), EveryDraft())
    events: list[str] = []
    drawn, launch = EagerExecutor._drawn, mx.async_eval

    def note_launch(*args: Any) -> None:
        events.append("layers" if isinstance(args[0], mx.array) else "rest")
        launch(*args)

    def note_sampling(*args: Any) -> Drawn:
        events.append("sampling")
        return drawn(*args)

    monkeypatch.setattr(EagerExecutor, "_holds_back", lambda executor: False)
    monkeypatch.setattr(EagerExecutor, "_drawn", note_sampling)
    monkeypatch.setattr(mx, "async_eval", note_launch)
    assert company.run(wanted)["r0"].tokens == plain["r0"].tokens
    launched = [before for before, event in pairwise(events) if event == "sampling"].count("layers")
    assert launched >= 8 if drafts else launched == 1  # of the prompt


@pytest.mark.parametrize("recorded", [False, True])
def test_nothing_is_learnt_from_steps_for_which_graphs_were_recorded(
    opened: Open, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = opened("llama")
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20)
    wanted = prompts((3,), tokens=12)
    plain = Company(loaded, config).run(wanted)
    company = Company(loaded, config, (Scripted(plain, KINDS["right"], 3),), EveryDraft())
    collect, waits, times = EagerExecutor.collect, list[float](), list[int]()
    monkeypatch.setattr(
        EagerExecutor, "collect", lambda executor: replace(collect(executor), recorded=recorded)
    )
    monkeypatch.setattr(
        WorthwhileDrafts,
        "observe_wait",
        lambda lengths, seconds, rows, **named: waits.append(seconds),
    )
    monkeypatch.setattr(StepTimes, "observe", lambda table, rows, *measured: times.append(rows))
    company.run(wanted)
    assert bool(waits) is not recorded
    assert bool(times) is not recorded


def test_what_came_true_is_counted_and_reported_while_the_device_computes(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with drafts is launched before anything that its plan does not depend on."""
    loaded = opened("llama")
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20)
    wanted = prompts((3, 5), tokens=12)
    plain = Company(loaded, config).run(wanted)
    company = Company(loaded, config, (Scripted(plain, KINDS["right"], 3),), EveryDraft())
    events: list[str] = []

    def noted(owner: Any, name: str, event: str) -> None:
        call = getattr(owner, name)

        def note(*args: Any, **named: Any) -> Any:
            events.append(event)
            return call(*args, **named)

        monkeypatch.setattr(owner, name, note)

    noted(Scheduler, "update", "tokens")
    noted(EagerExecutor, "_start", "launched")
    noted(Drafting, "observe", "counted")
    noted(Scheduler, "take_outputs", "reported")
    assert company.run(wanted)["r1"].tokens == plain["r1"].tokens
    assert events.count("counted") >= 3
    before = [each for each, event in pairwise(events) if event == "launched"]
    assert before[1:] == ["tokens"] * len(before[1:])


@pytest.mark.parametrize("kind", ["right", "lying"])
def test_drafting_follows_from_what_came_true(opened: Open, kind: str) -> None:
    """Step times are given; a drafter whose drafts are wrong is soon asked no more."""
    loaded = opened("llama")
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20)
    wanted = prompts((3,), tokens=120)
    plain = Company(loaded, config)
    plain.run(wanted)
    drafter = Scripted(plain.answers, KINDS[kind])
    steps_s = [1e6 + 1e5 * rows for rows in range(100)]  # beside which nobody waits long
    lengths = WorthwhileDrafts(lambda first, last: steps_s[first : last + 1])
    company = Company(loaded, config, (drafter,), lengths)
    assert company.run(wanted)["r0"].tokens == plain.answers["r0"].tokens
    steps = company.engine.stats().steps
    if kind == "right":
        assert steps < 60
    else:
        assert drafter.wrong < 40
        assert steps == plain.engine.stats().steps


SAMPLED = (
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.8, top_p=0.9, seed=8, logprobs=2),
    SamplingParams(temperature=0, presence_penalty=0.7, frequency_penalty=0.9),
    SamplingParams(temperature=0, repetition_penalty=1.8, logit_bias=((7, 2.0),)),
    SamplingParams(temperature=0, dry_multiplier=4.0, dry_allowed_length=1),
    SamplingParams(temperature=0.9, typical_p=0.8, xtc_probability=0.5, xtc_threshold=0.02, seed=9),
)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_seeded_and_penalised_answers_are_the_same(opened: Open, family: str) -> None:
    loaded = opened(family)
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20)
    lengths = (5, 30, 64, 70, 12, 33)
    wanted = [
        replace(request, sampling=params)
        for request, params in zip(prompts(lengths, tokens=36), SAMPLED, strict=True)
    ]
    plain = Company(loaded, config)
    plain.run(wanted)
    company, drafter = run(loaded, config, wanted, plain.answers)
    for request in wanted:
        assert company.answers[request.id].tokens == plain.answers[request.id].tokens
        ours, theirs = company.answers[request.id].logprobs, plain.answers[request.id].logprobs
        assert [each.token_id for each in ours] == [each.token_id for each in theirs]
        assert [each.logprob for each in ours] == pytest.approx(
            [each.logprob for each in theirs], abs=1e-4
        )
    assert drafter.right > 50
    assert drafter.wrong > 20


def bound(requests: list[Request]) -> list[Request]:
    """Return the requests: one with banned tokens, one with a thinking budget, one with a least
    length.
    """
    rules = TokenRules(banned=((7,), (9, 11), *((each,) for each in range(100, 150))))
    thinking = ThinkingBudget(max_tokens=8, start_ids=(), end_ids=(5, 6))
    return [
        replace(requests[0], rules=rules),
        replace(requests[1], thinking=thinking, rules=rules),
        replace(requests[2], min_tokens=30),
    ]


@pytest.mark.parametrize(
    ("family", "kind"),
    everyday(
        product(FAMILIES, ("right", "random")),
        lambda family, kind: (family, kind) == ("qwen3_5", "random"),
    ),
)
def test_bound_answers_are_drafted_and_the_same(opened: Open, family: str, kind: str) -> None:
    loaded = opened(family)
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20)
    wanted = bound(prompts((3, 40, 64), tokens=40))
    plain = Company(loaded, config)
    plain.run(wanted)
    company, drafter = run(loaded, config, wanted, plain.answers, kind)
    assert_same(company.answers, plain.answers, [request.id for request in wanted])
    assert drafter.right > 30
    assert company.engine.stats().steps < plain.engine.stats().steps


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return open_model(str(MODEL_DIR), dtype="float32")


@pytest.mark.parametrize("temperature", everyday([0.0, 1.0], (1.0).__eq__))
def test_drafts_end_where_a_grammar_would_be_broken(demo: LoadedModel, temperature: float) -> None:
    config = EngineConfig(str(demo.path), kv_memory=64 << 20)
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}'
    grammar = GrammarSpec("json_schema", schema + ', "required": ["a", "b"]}', schema=True)
    sampling = SamplingParams(temperature=temperature, seed=3)
    wanted = [
        replace(each, grammar=grammar, sampling=sampling, stop_token_ids=demo.eos_ids)
        for each in prompts((20, 40), tokens=40)
    ]
    plain = Company(demo, config)
    plain.run(wanted)
    company, drafter = run(demo, config, wanted, plain.answers)
    for request in wanted:
        assert company.answers[request.id].tokens == plain.answers[request.id].tokens
        assert (
            company.answers[request.id].ends[0].finish == plain.answers[request.id].ends[0].finish
        )
    assert drafter.right > 8
    assert drafter.wrong > 4


@pytest.mark.parametrize("family", everyday(FAMILIES, lambda family: family == "qwen3_5"))
def test_what_was_drafted_is_reused_and_survives_pre_emption(opened: Open, family: str) -> None:
    loaded = opened(family)
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20, block_size=16)
    wanted = prompts((3, 40, 64, 130), tokens=60)
    plain = Company(loaded, config)
    plain.run(wanted)
    budget = plain.engine._scheduler.limits.worst_case_bytes(config.kv_format, 250)
    company, _ = run(loaded, replace(config, kv_memory=budget), wanted, plain.answers)
    assert_same(company.answers, plain.answers, [request.id for request in wanted])
    assert company.engine.stats().preemptions > 0
    # Turn two of a conversation finds in the cache what drafts computed, and goes on as if alone.
    second = [
        replace(request, id=f"second {request.id}", prompt=(*request.prompt, *answer.tokens, 9))
        for request in wanted[:1]
        for answer in [plain.answers[request.id]]
    ]
    expected = Company(loaded, replace(config, prefix_cache=False)).run(second)
    known = plain.answers | expected
    drafter = Scripted(known, KINDS["random"])
    company = Company(loaded, config, (drafter,), EveryDraft())
    company.run(wanted[:1])
    got = company.run(second)
    assert_same(got, expected, [request.id for request in second])
    assert got["second r0"].ends[0].cached_tokens >= 32
