"""`--speculate draft=MODEL`: the budget is divided, and a model of another vocabulary refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ModelError, QuireError
from quire.core.request import Request, SamplingParams
from quire.demo import MODEL_DIR
from quire.engine.draft_opening import open_draft_model, open_drafters
from quire.engine.factory import open_engine
from quire.models.weights.loader import LoadedModel, open_model
from tests.support.tiny_models import tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_model(tmp_path_factory.mktemp("llama"), "llama")
    return open_model(str(folder), dtype="float32")


def test_both_models_share_the_budget(tiny: LoadedModel) -> None:
    config = EngineConfig(str(tiny.path), dtype="float32", kv_memory=32 << 20)
    own, drafter = open_draft_model(config, str(tiny.path), tiny)
    assert own.kv_memory == 16 << 20
    assert drafter._manager.capacity.claimed == 0


def test_another_vocabulary_is_refused(tiny: LoadedModel, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", "llama")
    for folder, text in ((tiny.path, "a"), (other, "b")):
        vocabulary = {"model": {"vocab": {text: 0}}}
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ModelError, match="another vocabulary"):
        open_draft_model(EngineConfig(str(tiny.path)), str(other), tiny)
    (tiny.path / "tokenizer.json").unlink()


def test_a_draft_model_that_is_not_there_is_named() -> None:
    with pytest.raises(QuireError, match="nowhere/model"):
        open_engine(EngineConfig(str(MODEL_DIR), draft_model="/nowhere/model"))


def test_a_drafter_that_reads_states_is_refused_for_a_split_model(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_assistant"}))
    config = EngineConfig(str(tiny.path), ranks=2, draft_model=str(tmp_path))
    with pytest.raises(ModelError, match="hidden states, which split models do not support"):
        open_drafters(tiny, config)


def test_an_engine_opens_with_its_draft_model(tiny: LoadedModel) -> None:
    path = str(tiny.path)
    config = EngineConfig(path, dtype="float32", kv_memory=32 << 20, draft_model=path)
    engine = open_engine(replace(config, speculate="draft", max_step_tokens=64))
    assert engine.info.kv_memory == 16 << 20
    engine.add(Request("r", tuple(range(20, 60)), SamplingParams(temperature=0), max_tokens=24))
    while engine.has_work:
        engine.step()
        engine.flush()
    assert dict(engine.stats().finished)["length"] == 1
