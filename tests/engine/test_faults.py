"""Faults stay with their request, or with the step; the engine goes on, or says that it cannot."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.errors import EngineFailure
from quire.core.request import FinishReason, GrammarSpec, Request, SamplingParams
from quire.demo import MODEL_DIR
from quire.executor.step import LaunchedStep
from quire.models.weights.loader import LoadedModel, open_model
from tests.support.parity import Company, Generated, alone, assert_same, executor_of, prompts
from tests.support.tiny_models import tiny_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_model(Path(tmp_path_factory.mktemp("llama")), "llama")
    return open_model(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def config(loaded: LoadedModel) -> EngineConfig:
    return EngineConfig(str(loaded.path), kv_memory=32 << 20)


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel, config: EngineConfig) -> dict[str, Generated]:
    """Return what three requests get alone."""
    return alone(loaded, config, prompts()[:3])


def break_steps(company: Company, count: int) -> None:
    """The next `count` launches raise, as MLX does when the device refuses a kernel."""
    executor = executor_of(company.engine)
    start, left = executor._start, [count]

    def refuse(step: LaunchedStep) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise RuntimeError("the device refuses")
        start(step)

    executor._start = refuse  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "bad",
    [
        Request("bad", ()),
        Request("bad", (5,), max_tokens=0),
        Request("bad", tuple(range(3, 250)) * 8),
        Request("r0", (5, 6)),
    ],
    ids=["empty prompt", "no tokens wanted", "longer than the context", "an id in use"],
)
def test_a_bad_request_ends_alone(
    loaded: LoadedModel, config: EngineConfig, expected: dict[str, Generated], bad: Request
) -> None:
    wanted = prompts()[:3]
    company = Company(loaded, config)
    for request in wanted:
        company.add(request)
    for _ in range(5):
        company.step()
    company.engine.add(bad)
    refused = []
    while company.engine.has_work:
        for output in company.engine.step():
            if output.error is not None:
                refused.append(output)
                continue
            answer = company.answers[output.request_id]
            answer.tokens += output.token_ids
            if output.finish is not None:
                answer.ends.append(output)
    assert [output.finish for output in refused] == [FinishReason.ERROR]
    assert refused[0].error is not None
    assert refused[0].error.status == 400
    assert_same(company.answers, expected, [request.id for request in wanted])


def test_a_failed_step_ends_its_requests_and_no_others(
    loaded: LoadedModel, config: EngineConfig
) -> None:
    wanted = prompts((40, 70))
    expected = alone(loaded, config, wanted[1:])
    company = Company(loaded, config)
    company.add(wanted[0])
    for _ in range(5):
        company.step()
    break_steps(company, 1)
    while company.engine.has_work:
        company.step()
    assert [end.finish for end in company.answers["r0"].ends] == [FinishReason.ERROR]
    company.run(wanted[1:])
    assert_same(company.answers, expected, ["r1"])
    stats = company.engine.stats()
    assert sum(used for _, used in stats.kv_used) == 0


def test_a_step_that_fails_between_two_steps_fails_alone(
    loaded: LoadedModel, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine on a CPU launches a part of a step while the host waits for requests."""
    wanted = prompts((40, 70))
    expected = alone(loaded, config, wanted[1:])
    company = Company(loaded, config)
    company.add(wanted[0])
    company.step()

    def refuse() -> None:
        raise RuntimeError("the device refuses")

    with monkeypatch.context() as patched:
        patched.setattr(company.engine._executor, "flush", refuse)
        company.engine.flush()
    company.run(wanted[1:])
    assert [end.finish for end in company.answers["r0"].ends] == [FinishReason.ERROR]
    assert_same(company.answers, expected, ["r1"])


def test_steps_that_fail_in_a_row_end_the_engine(loaded: LoadedModel, config: EngineConfig) -> None:
    company = Company(loaded, config)
    break_steps(company, 99)

    def serve() -> None:
        for request in prompts((5, 6, 7, 8)):
            company.add(request)
            while company.engine.has_work:
                company.step()

    with pytest.raises(EngineFailure, match="in a row"):
        serve()


def test_a_grammar_that_cannot_be_compiled_is_the_requests_fault(
    loaded: LoadedModel, config: EngineConfig
) -> None:
    shutil.copy(MODEL_DIR / "tokenizer.json", loaded.path)
    company = Company(loaded, config)
    grammar = GrammarSpec("json_schema", '{"type": "nonsense"}')
    company.add(Request("bad", (5, 6), SamplingParams(), grammar=grammar))
    while company.engine.has_work:
        company.step()
    (end,) = company.answers["bad"].ends
    assert end.error is not None
    assert (end.error.status, end.error.code) == (400, "invalid_schema")


class Unable:
    """A token constraint that cannot say what may come first."""

    def mask(self) -> None:
        raise ValueError("outgrew its limits")

    def accept(self, token: int) -> None:
        raise AssertionError("nothing was allowed")


def test_a_constraint_that_fails_before_the_first_token_ends_the_request_once(
    loaded: LoadedModel, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    company = Company(loaded, config)
    monkeypatch.setattr(company.engine.constraints, "make", lambda request: Unable())
    answers = company.run([Request("bad", (5, 6), SamplingParams())])
    (end,) = answers["bad"].ends
    assert end.error is not None
    assert end.error.message == "The request could not be queued."  # nothing of the server's own


def test_more_memory_than_there_is_is_refused(loaded: LoadedModel, config: EngineConfig) -> None:
    from quire.core.errors import ModelError

    huge = EngineConfig(str(loaded.path), kv_memory=1 << 50)
    with pytest.raises(ModelError, match="TB were requested"):
        Company(loaded, huge)
    tiny = EngineConfig(str(loaded.path), kv_memory=1 << 10)
    with pytest.raises(ModelError, match="holds a context of"):
        Company(loaded, tiny)
    assert mx.get_active_memory() < 1 << 40
