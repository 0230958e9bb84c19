"""Kernels are made ready by an engine that leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.core.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.warm_up import warm_up
from quire.models.loader import open_model
from quire.scheduler.plan import StepPlan
from quire.scheduler.scheduler import Scheduler
from tests.support.tiny_models import tiny_model


def test_chunks_and_streams_of_every_size_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(tiny_model(tmp_path, "llama"))
    loaded = open_model(folder, dtype="float32")
    config = EngineConfig(
        folder, kv_memory=64 << 20, page_tokens=16, max_sequences=6, max_step_tokens=128
    )
    plans: list[StepPlan] = []
    schedule = Scheduler.schedule

    def noted(self: Scheduler) -> StepPlan | None:
        plan = schedule(self)
        if plan is not None:
            plans.append(plan)
        return plan

    monkeypatch.setattr(Scheduler, "schedule", noted)
    told: list[tuple[int, int]] = []
    warm_up(loaded, config, lambda done, total: told.append((done, total)))
    rounds = told[-1][1]
    assert told == [(done, rounds) for done in range(rounds + 1)]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    chunks = {plan.prompt_rows.bit_length() for plan in plans if not plan.decode_rows}
    assert chunks >= {(16 << n).bit_length() for n in range(4)}  # 16 rows or so, to 128
    assert {plan.decode_rows for plan in plans if not plan.prompt_rows} >= {1, 2, 4, 6}
    assert any(plan.prompt_rows and plan.decode_rows for plan in plans)
    engine = Engine(loaded, config)
    assert engine.stats().steps == 0
    assert engine.stats().prompt_tokens == 0
