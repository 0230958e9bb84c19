"""An assistant of Gemma 4 drafts within the engine's steps, and changes no answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ModelError
from quire.core.kv_format import KVFormat
from quire.engine.draft_opening import open_drafters
from quire.engine.factory import open_engine
from quire.models.base import named_parameters
from quire.models.families.gemma4_assistant import build_assistant
from quire.models.weights.loader import LoadedModel, open_model
from quire.scheduler.draft_lengths import EveryDraft
from tests.engine.test_prediction_head import Recording
from tests.engine.test_speculation import SAMPLED
from tests.models.solo import SoloStep
from tests.support.parity import Company, assert_same, prompts
from tests.support.tiny_models import FULL, SLIDING, gemma4_config, tiny_model

GUESSES = 3


def write_assistant(folder: Path, loaded: LoadedModel) -> Path:
    """Writes an assistant of two layers with random weights."""
    text = gemma4_config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        layer_types=[SLIDING, FULL],
        num_kv_shared_layers=2,
        attention_k_eq_v=False,
        final_logit_softcapping=None,
    )
    config = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 64,
        "text_config": text,
        "use_ordered_embeddings": True,
        "num_centroids": 16,
        "centroid_intermediate_top_k": 4,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    places = named_parameters(build_assistant(config, loaded.model, folder))
    loaded.model.lend_keys(())
    weights = {}
    for number, (name, place) in enumerate(sorted(places.items())):
        noise = mx.random.normal(place.shape, key=mx.random.key(number))
        near_one = 1 + 0.1 * noise
        weights[name] = near_one if place.ndim == 1 else 1.5 * noise * place.shape[-1] ** -0.5
    weights["masked_embedding.token_ordering"] = mx.arange(256)[::-1].astype(mx.int64)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def opened(folder: Path, family: str) -> tuple[LoadedModel, EngineConfig, Any]:
    """Return a tiny Gemma 4 with an assistant: the model, settings, the guesser."""
    path = tiny_model(folder / "model", family)
    loaded = open_model(str(path), dtype="float32")
    assistant = write_assistant(folder / "assistant", loaded)
    config = EngineConfig(
        str(path), kv_memory=64 << 20, block_size=32, speculate="draft", dtype="float32"
    )
    config = replace(config, draft_model=str(assistant), max_step_tokens=33)
    found = open_drafters(loaded, config)
    assert len(loaded.model.layout) == len(loaded.model.own_layout) + 2
    return loaded, config, found.guesser


def expected(loaded: LoadedModel, guesser: Any, tokens: list[int]) -> list[list[int]]:
    """Return the guesses after each token but the last, everything computed at once."""
    step = SoloStep(loaded.model.layout, tokens[:-1])
    hidden, following = loaded.model(step), mx.array(tokens[1:])
    found = []
    for _ in range(GUESSES):
        rows, assistant = guesser._rows(hidden, following, step), guesser._assistant
        following, hidden = mx.argmax(assistant.logits(rows), axis=-1), assistant.further(rows)
        found.append(following.tolist())
    return [list(each) for each in zip(*found, strict=True)]


@pytest.mark.parametrize(
    "family", ["gemma4_ple", pytest.param("gemma4_moe", marks=pytest.mark.slow)]
)
def test_guesses_are_the_assistant_s_however_rows_are_computed(tmp_path: Path, family: str) -> None:
    """Guesses are compared in chunks, in a batch, after wrong drafts, and where late layers see few
    rows.
    """
    loaded, config, guesser = opened(tmp_path, family)
    wanted = prompts((3, 32, 40), tokens=16)
    wanted[1] = replace(wanted[1], sampling=SAMPLED[1])
    plain = Company(loaded, config).run(wanted, every=2)
    drafter = Recording(GUESSES, "draft")
    company = Company(loaded, config, (drafter,), EveryDraft(), guesser)
    company.run(wanted, every=2)
    assert_same(company.answers, plain, [each.id for each in wanted])
    for request in wanted:
        tokens = [*request.prompt, *plain[request.id].tokens]
        guesses = expected(loaded, guesser, tokens)
        own = {at: list(d) for (name, at), d in drafter.drafted.items() if name == request.id}
        assert len(own) > 8
        assert own == {at: guesses[at - 2][: len(own[at])] for at in own}


@pytest.mark.slow
@pytest.mark.parametrize("format", [KVFormat("page", 4, 4), KVFormat("uniform", 8, 8)])
def test_packed_keys_are_read_as_well(tmp_path: Path, format: KVFormat) -> None:
    loaded, config, guesser = opened(tmp_path, "gemma4")
    config = replace(config, kv_format=format, kv_skip_layers=())
    wanted = prompts((3, 32, 40), tokens=40)
    plain = Company(loaded, config).run(wanted)
    company = Company(loaded, config, (Recording(GUESSES, "draft"),), EveryDraft(), guesser)
    company.run(wanted)
    assert_same(company.answers, plain, [each.id for each in wanted])
    assert dict(company.engine.stats().drafts)["draft"] > 40


def test_an_engine_opens_with_its_assistant(tmp_path: Path) -> None:
    _, config, _ = opened(tmp_path, "gemma4")
    engine = open_engine(config)
    engine.add(prompts((20,), tokens=12)[0])
    while engine.has_work:
        engine.step()
        engine.flush()
    assert dict(engine.stats().finished)["length"] == 1
    other = open_model(str(tiny_model(tmp_path / "llama", "llama")), dtype="float32")
    with pytest.raises(ModelError, match="assistant for Gemma 4"):
        open_drafters(other, config)
