"""`Engine.step`: in which order it does what, and what happens between two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.core.config import EngineConfig
from quire.core.request import FinishReason, Request, SamplingParams
from quire.models.weights.loader import LoadedModel, open_model
from quire.scale.routing import Route, short_keys
from quire.scheduler.plan import StepPlan
from tests.support.parity import Company, alone, prompts
from tests.support.tiny_models import tiny_model

TOKENS = 5


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_model(Path(tmp_path_factory.mktemp("llama")), "llama")
    return open_model(str(folder), dtype="float32")


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig(model="", kv_memory=8 << 20)


@pytest.fixture
def company(loaded: LoadedModel, config: EngineConfig) -> Company:
    return Company(loaded, config)


def watch(company: Company, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Return what the engine asks of the scheduler and the runner, with what it gets or gives."""
    calls: list[tuple[str, Any]] = []
    engine = company.engine

    def spy(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def called(*args: Any) -> Any:
            result = real(*args)
            calls.append((name, args[0] if args else result))
            return result

        monkeypatch.setattr(owner, name, called)

    for name in ("schedule", "update"):
        spy(engine._scheduler, name)
    for name in ("launch", "collect"):
        spy(engine._executor, name)
    return calls


def names(plan: StepPlan) -> list[str]:
    return [rows.id for rows in plan.sequences]


def test_a_step_is_planned_and_launched_before_the_one_before_is_read(
    company: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    (request,) = prompts((6,), TOKENS)
    calls = watch(company, monkeypatch)
    company.add(request)
    company.step()
    assert [name for name, _ in calls] == ["schedule", "launch"]
    first = calls[1][1]
    calls.clear()
    company.step()
    assert [name for name, _ in calls] == ["schedule", "launch", "collect", "update"]
    assert calls[3][1] is first


def test_tokens_come_one_step_after_their_rows(company: Company) -> None:
    (request,) = prompts((6,), TOKENS)
    company.add(request)
    counts = []
    while company.engine.has_work:
        company.step()
        counts.append(len(company.answers[request.id].tokens))
    assert counts[: TOKENS + 1] == list(range(TOKENS + 1))
    assert company.answers[request.id].ends[0].finish is FinishReason.LENGTH


def test_what_comes_after_the_launch_is_in_the_next_plan(
    company: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = prompts((6, 7), TOKENS)
    calls = watch(company, monkeypatch)
    company.add(first)
    company.step()
    company.engine.flush()
    company.add(second)
    company.step()
    plans = [plan for name, plan in calls if name == "schedule"]
    assert [names(plan) for plan in plans] == [[first.id], [first.id, second.id]]


def test_an_abort_ends_a_request_before_the_next_plan(
    loaded: LoadedModel, config: EngineConfig, company: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = prompts((6, 7), TOKENS)
    gone, stays = requests
    for request in requests:
        company.add(request)
    company.step()
    company.step()
    calls = watch(company, monkeypatch)
    company.engine.abort(gone.id)
    company.run([])
    assert all(gone.id not in names(plan) for name, plan in calls if name == "schedule" and plan)
    (end,) = company.answers[gone.id].ends
    assert end.finish is FinishReason.ABORT
    assert company.answers[stays.id].tokens == alone(loaded, config, [stays])[stays.id].tokens


def test_a_refused_request_ends_with_the_step_and_nobody_notices(
    loaded: LoadedModel, config: EngineConfig, company: Company
) -> None:
    (request,) = prompts((6,), TOKENS)
    company.add(request)
    company.add(Request("bad", (5,), SamplingParams(logit_bias=((10**6, 1.0),))))
    company.run([])
    (end,) = company.answers["bad"].ends
    assert end.finish is FinishReason.ERROR
    assert company.answers[request.id].tokens == alone(loaded, config, [request])[request.id].tokens


def test_without_work_a_step_does_nothing(company: Company) -> None:
    assert not company.engine.has_work
    assert company.engine.step() == []
    assert company.engine.expected_step_s == float("inf")


def test_the_engine_reports_the_blocks_that_prompts_may_reuse(company: Company) -> None:
    (request,) = prompts((200,), tokens=TOKENS)
    engine = company.engine
    assert engine.cached() == b""
    company.run([request])
    route = Route.of(request, engine.info.blocks)
    assert len(route.keys()) == 200 // engine.config.block_size
    assert set(route.keys()) <= set(short_keys(engine.cached()))
