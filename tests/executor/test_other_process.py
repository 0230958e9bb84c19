"""An engine whose executor is in another process: pickled plans and bytes by key are enough."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.engine.assembly import assemble
from quire.engine.engine import Engine
from quire.models.weights.loader import LoadedModel, open_model
from quire.scheduler.plan import StepPlan
from tests.engine.test_image_parity import FAMILIES, WHOLE, requests
from tests.support.other_process import OtherProcess
from tests.support.tiny_models import write_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = write_model(tmp_path_factory.mktemp("seeing"), FAMILIES[WHOLE])
    return open_model(str(path), dtype="float32")


@pytest.fixture(scope="module")
def config(loaded: LoadedModel) -> EngineConfig:
    return EngineConfig(str(loaded.path), kv_memory=64 << 20)


@pytest.fixture(scope="module")
def elsewhere(loaded: LoadedModel, config: EngineConfig) -> Iterator[Engine]:
    made: list[OtherProcess] = []

    def open_elsewhere(*arguments: Any, **parts: Any) -> OtherProcess:
        made.append(OtherProcess(*arguments, **parts))
        return made[0]

    yield assemble(loaded, config, open_executor=open_elsewhere)
    made[0].close()


def serve(engine: Engine, wanted: list[Request]) -> dict[str, tuple[int, ...]]:
    answers: dict[str, tuple[int, ...]] = {each.id: () for each in wanted}
    for each in wanted:
        engine.add(each)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            answers[output.request_id] += output.token_ids
        engine.flush()
    return answers


def seen() -> list[Request]:
    """Return prompts with pictures and without, and one that is sampled."""
    wanted = [replace(each, max_tokens=6) for each in requests(WHOLE)[1:4]]
    drawn = SamplingParams(temperature=1, seed=3, frequency_penalty=0.5, logprobs=1)
    return [*wanted, replace(wanted[0], id="drawn", sampling=drawn)]


def test_an_executor_in_another_process_gives_the_same_tokens(
    loaded: LoadedModel, config: EngineConfig, elsewhere: Engine
) -> None:
    assert serve(elsewhere, seen()) == serve(assemble(loaded, config), seen())


def test_plans_and_unfinished_requests_hold_no_bytes_of_media(
    loaded: LoadedModel, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = assemble(loaded, config)
    contents, launch = engine._executor.contents, engine._executor.launch
    plans: list[bytes] = []
    held: list[int] = []

    def noted(plan: StepPlan | None) -> float:
        plans.append(pickle.dumps(plan))
        held.append(len(contents._features))
        return launch(plan)

    monkeypatch.setattr(engine._executor, "launch", noted)
    wanted = seen()
    serve(engine, wanted)
    items = {each.item.key: each.item for request in wanted for each in request.media}
    assert max(held) == len(items)
    assert not any(item.features in plan for item in items.values() for plan in plans)
    assert not contents._features, "a request has ended, and its pictures are kept"
