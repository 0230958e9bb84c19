"""Kernels are made ready by an engine that leaves nothing behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from quire.core.config import EngineConfig
from quire.device.device import current_device
from quire.device.verified import VerifiedKernels
from quire.engine import warm_up as module
from quire.engine.assembly import assemble
from quire.engine.warm_up import measure_steps, warm_up
from quire.models.base import LanguageModel
from quire.models.weights.loader import LoadedModel, open_model
from quire.scheduler.plan import StepPlan
from quire.scheduler.scheduler import Scheduler
from tests.executor.test_adapters import adapter, checkpoint
from tests.support.tiny_models import llama_config, tiny_model


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    return open_model(str(tiny_model(tmp_path, "llama")), dtype="float32")


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Return the plans that schedulers make from now on."""
    found: list[StepPlan] = []
    schedule = Scheduler.schedule

    def noted(self: Scheduler) -> StepPlan | None:
        plan = schedule(self)
        if plan is not None:
            found.append(plan)
        return plan

    monkeypatch.setattr(Scheduler, "schedule", noted)
    return found


def test_chunks_and_streams_of_every_size_are_run(
    loaded: LoadedModel,
    plans: list[StepPlan],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(
        "", kv_memory=64 << 20, block_size=16, max_sequences=6, max_step_tokens=128
    )
    encoded = list[LanguageModel]()
    monkeypatch.setattr(module, "encode_examples", encoded.append)
    told: list[tuple[int, int]] = []
    warm_up(loaded, config, lambda done, total: told.append((done, total)))
    assert encoded == [loaded.model]
    rounds = told[-1][1]
    assert told == [(done, rounds) for done in range(rounds + 1)]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    chunks = {plan.prompt_rows.bit_length() for plan in plans if not plan.decode_rows}
    assert chunks >= {(16 << n).bit_length() for n in range(4)}  # 16 rows or so, to 128
    assert {plan.decode_rows for plan in plans if not plan.prompt_rows} >= {1, 2, 4, 6}
    beside = {plan.decode_rows for plan in plans if plan.prompt_rows > 64}
    assert beside >= {1, 2, 4, 5}  # of six sequences one reads its prompt
    check_burst(plans, 100)
    engine = assemble(loaded, config)
    assert engine.stats().steps == 0
    assert engine.stats().prompt_tokens == 0


def check_burst(plans: list[StepPlan], rows: int) -> None:
    """Full steps read several long prompts, and one beside streams of those read before."""
    full = [plan for plan in plans if plan.prompt_rows > rows]
    assert any(plan.prompt_chunks > 1 and not plan.decode_rows for plan in full)
    assert any(plan.prompt_chunks and plan.decode_rows for plan in full)


def test_where_all_is_compiled_a_start_runs_first_requests_alone(
    loaded: LoadedModel, plans: list[StepPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = VerifiedKernels(tmp_path / "verified", "")
    monkeypatch.setattr(module, "verified_kernels", lambda: verified)
    monkeypatch.setattr(type(current_device()), "keeps_compiled", True)
    config = EngineConfig("", kv_memory=64 << 20, max_sequences=2, max_step_tokens=64)
    sizes = []
    for own in (config, config, replace(config, max_sequences=4)):
        plans.clear()
        warm_up(loaded, own)
        sizes.append(max(len(plan.sequences) for plan in plans))
        check_burst(plans, 50)
    assert sizes == [2, 2, 4]


def test_every_number_of_streams_is_run_with_an_adapter(
    tmp_path: Path, plans: list[StepPlan]
) -> None:
    weights = checkpoint(tmp_path / "base", llama_config())
    one = adapter(tmp_path / "one", weights, ["q_proj"], rank=2, seed=1)
    config = EngineConfig("", kv_memory=64 << 20, max_sequences=4, max_step_tokens=64)
    loaded = open_model(str(tmp_path / "base"))
    warm_up(loaded, replace(config, adapters=(("one", one), ("two", one))))
    adapted = [plan for plan in plans if any(each.adapter for each in plan.sequences)]
    assert {plan.decode_rows for plan in adapted if not plan.prompt_rows} >= {1, 2, 4}
    assert {each.adapter for plan in adapted for each in plan.sequences} == {"one"}


def test_steps_are_measured_up_to_the_time_aimed_at(
    loaded: LoadedModel, plans: list[StepPlan]
) -> None:
    config = EngineConfig("", kv_memory=64 << 20, max_sequences=2, max_step_tokens=70)
    times = measure_steps(loaded, replace(config, step_ms=1e6))
    assert [table.largest for table in (times.reading, times.reading_beside)] == [64, 64]
    assert times.generating.largest >= 1
    alone = [plan.prompt_rows for plan in plans if plan.prompt_rows > 1 and not plan.decode_rows]
    assert {rows: alone.count(rows) >= 2 for rows in alone} == dict.fromkeys((2, 8, 32, 64), True)
    beside = [plan.prompt_rows for plan in plans if plan.prompt_rows and plan.decode_rows]
    assert {2, 8, 32, 64} <= set(beside)
    plans.clear()
    measure_steps(loaded, replace(config, step_ms=1e-6))
    assert max(plan.prompt_rows for plan in plans) == 2


def test_eight_steps_of_each_number_of_drafts_are_measured(
    loaded: LoadedModel, plans: list[StepPlan]
) -> None:
    config = EngineConfig("", kv_memory=64 << 20, max_sequences=2, max_step_tokens=70)
    measure_steps(loaded, replace(config, step_ms=1e-6))
    steps = Counter(plan.decode_rows for plan in plans if not plan.prompt_rows)
    # Eight each, and one more wherever an answer with more drafts ends.
    assert {rows: steps[rows] for rows in (4, 8, 16)} == {4: 10, 8: 9, 16: 8}
