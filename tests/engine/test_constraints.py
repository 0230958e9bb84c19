"""Constraints on the next token besides a grammar: a minimum length."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from quire.constraints.masks import mask_of
from quire.core.config import EngineConfig
from quire.core.request import (
    FinishReason,
    GrammarSpec,
    Output,
    Request,
    SamplingParams,
    ThinkingBudget,
    TokenRules,
)
from quire.demo import MODEL_DIR
from quire.engine.constraints import ConstraintFactory
from quire.engine.engine import Engine
from quire.engine.factory import open_engine
from quire.sampling import loops
from quire.text.tokenizer import Tokenizer

VOCABULARY = 3072
ENDS = frozenset({1, 106})


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(EngineConfig(str(MODEL_DIR)))


def test_no_end_comes_before_the_least_length() -> None:
    factory = ConstraintFactory(MODEL_DIR, VOCABULARY, ENDS)
    request = Request("a", (5,), min_tokens=2, stop_token_ids=frozenset({9, 9_000_000}))
    constraint = factory.make(request)
    assert constraint is not None
    for _ in range(2):
        mask = constraint.mask()
        assert mask is not None
        assert not (mask & mask_of({9, *ENDS}, VOCABULARY)).any()
        constraint.accept(7)
    assert constraint.mask() is None


def test_a_grammar_that_is_met_ends_earlier() -> None:
    tokenizer = Tokenizer.open(MODEL_DIR)
    factory = ConstraintFactory(MODEL_DIR, VOCABULARY, ENDS)
    constraint = factory.make(Request("a", (5,), grammar=GrammarSpec("regex", "a"), min_tokens=9))
    assert constraint is not None
    (token,) = tokenizer.encode("a")
    constraint.accept(token)
    mask = constraint.mask()
    assert mask is not None
    assert (mask & mask_of(ENDS, VOCABULARY)).any()


def test_a_model_opens_with_its_compiler_of_grammars(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*args: object) -> None:
        raise AssertionError("streams wait for it")

    monkeypatch.setattr("quire.engine.constraints.GrammarCompiler", late)
    request = Request("a", (5,), grammar=GrammarSpec("regex", "a"), max_tokens=1)
    assert answer(engine, request).finish is FinishReason.LENGTH


def test_a_tokenizer_that_no_grammar_can_use_serves_all_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    factory = ConstraintFactory(tmp_path, VOCABULARY, ENDS)
    with caplog.at_level("INFO"):
        factory.open()
    assert "grammars are disabled" in caplog.text
    assert factory.make(Request("a", (5,), min_tokens=1)) is not None


def answer(engine: Engine, request: Request) -> Output:
    """Return the request's tokens, all in one output."""
    engine.add(request)
    tokens: list[int] = []
    while True:
        for output in engine.step():
            tokens += output.token_ids
            if output.finish is not None:
                return Output("", tuple(tokens), finish=output.finish)


def test_an_answer_grows_to_its_least_length(engine: Engine) -> None:
    tokenizer = Tokenizer.open(MODEL_DIR)
    prompt = tuple(tokenizer.encode("Hello.", add_special_tokens=True))
    greedy = SamplingParams(temperature=0)
    likely = answer(engine, Request("x", prompt, greedy, max_tokens=1)).token_ids[0]
    ends = frozenset({likely})
    short = Request("a", prompt, greedy, max_tokens=20, stop_token_ids=ends)
    assert answer(engine, short).token_ids == (likely,)
    long = Request("b", prompt, greedy, max_tokens=20, min_tokens=5, stop_token_ids=ends)
    found = answer(engine, long)
    assert likely not in found.token_ids[:5]
    assert len(found.token_ids) > 5 or found.finish is FinishReason.LENGTH


def test_bound_answers_are_the_same_alone_and_in_company(engine: Engine) -> None:
    prompt = tuple(Tokenizer.open(MODEL_DIR).encode("Hello.", add_special_tokens=True))
    regex = [None, "[a-z]{3,30}", "([0-9] ?){20}", "(yes|no)", "(?s:.*)"]
    grammars = [None if each is None else GrammarSpec("regex", each) for each in regex]
    requests = [
        Request(
            f"{number}",
            prompt,
            SamplingParams(temperature=1.0, seed=number, frequency_penalty=0.5 * (number % 2)),
            max_tokens=24,
            min_tokens=3 * (number % 3),
            stop_token_ids=ENDS,
            grammar=grammars[number % len(grammars)],
            thinking=ThinkingBudget(2, (), (300, 301)) if number in (5, 10) else None,
        )
        for number in range(12)
    ]
    alone = {each.id: answer(engine, each).token_ids for each in requests}
    together: dict[str, tuple[int, ...]] = {each.id: () for each in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            together[output.request_id] += output.token_ids
    assert together == alone
    assert all(together[str(number)][2:4] == (300, 301) for number in (5, 10))


def test_a_bound_answer_that_repeats_itself_ends_unless_asked_to_go_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "_BOUND_TOKENS", 64)
    digits = Request(
        "default",
        (5,),
        grammar=GrammarSpec("regex", "1{4000}"),
        sampling=SamplingParams(temperature=0),
        max_tokens=90,
    )
    for request in (digits, replace(digits, id="on", stop_on_loop=0)):
        engine.add(request)
    ends: dict[str, Output] = {}
    counts = {"default": 0, "on": 0}
    while engine.has_work:
        for output in engine.step():
            counts[output.request_id] += len(output.token_ids)
            if output.finish is not None:
                ends[output.request_id] = output
    assert ends["default"].finish is FinishReason.LOOP
    assert counts["default"] < 90
    assert ends["on"].finish is FinishReason.LENGTH


def test_tokens_that_are_allowed_and_banned(engine: Engine) -> None:
    rules = TokenRules(allowed=(7, 8, 9), banned=((7,), (8, 8)))
    engine.add(Request("a", (5,), max_tokens=20, rules=rules))
    engine.add(Request("b", (5,), rules=TokenRules(allowed=(7,), banned=((7,),))))
    tokens: list[int] = []
    errors: list[str | None] = []
    while engine.has_work:
        for output in engine.step():
            if output.request_id == "a":
                tokens += output.token_ids
            elif output.error is not None:
                errors.append(output.error.code)
    assert len(tokens) == 20
    assert set(tokens) <= {8, 9}
    assert (8, 8) not in set(pairwise(tokens))
    assert errors == ["no_token_allowed"]
