"""The benchmark of speculation with an imposed acceptance, on the embedded model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import speculation as benchmark
from quire.core.config import EngineConfig
from quire.demo import MODEL_DIR
from quire.executor import eager
from quire.executor.factory import open_executor
from quire.models.weights.loader import open_model
from quire.sampling import history


def test_step_costs_are_those_of_the_wanted_numbers_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also steps with drafts, whose tokens are read before the next one is planned."""
    loaded = open_model(str(MODEL_DIR))
    monkeypatch.setattr(benchmark, "_FIXED_TOKENS", 12)
    answers = benchmark.Answers(12, loaded.model.vocab_size)
    monkeypatch.setattr(eager, "sample", answers.sampled)
    monkeypatch.setattr(history, "is_greedy", lambda params: False)
    monkeypatch.setattr(benchmark, "drawn", lambda count, seed: tuple(range(10, 10 + count)))
    monkeypatch.setattr(benchmark, "_FIXED", ((1, 0), (1, 2), (2, 1)))
    config = EngineConfig(str(MODEL_DIR), max_sequences=2, prefix_cache=False)
    costs = benchmark.step_costs(loaded, config, answers, open_executor, ahead=False)
    assert [(row["streams"], row["rows"]) for row in costs] == [(1, 1), (1, 3), (2, 4)]
    for row in costs:
        assert row["ran"] > 0
        assert row["waits"] is not None or row["rows"] == row["streams"]
