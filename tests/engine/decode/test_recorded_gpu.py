"""Recorded decode steps on a GPU: `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.attention.backend import Backends
from quire.attention.reference import ReferenceBackend
from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.request import Request, SamplingParams
from quire.device.device import current_device
from quire.device.operations import Operations
from quire.engine import runner
from quire.engine.decode.whole import MOST_ROWS, WholeDecode, open_whole_decode
from quire.models.base import LanguageModel, named_parameters
from quire.models.loader import LoadedModel
from tests.engine.decode.test_recording import FAMILIES, packed_model
from tests.support.parity import SCENARIOS, Company, Generated, alone, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA"),
]

TOKENS = 12
NEAR = 0.1
"""The most that a logit of the token drawn may be below the reference's best, in deviations of the
row's logits: bfloat16 turns ties."""


def opened(config: dict[str, Any]) -> LoadedModel:
    mx.random.seed(0)
    model = packed_model(config)
    size = sum(each.nbytes for each in named_parameters(model).values())
    return LoadedModel(model, config, Path(), frozenset(), "random", size, 1024, 1024, "bfloat16")


@pytest.fixture
def wholes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WholeDecode]]:
    """Those that engines open from now on."""
    found: list[WholeDecode] = []

    def noted(*arguments: Any, batch_invariant: bool) -> WholeDecode | None:
        whole = open_whole_decode(*arguments, batch_invariant=batch_invariant)
        if whole is not None:
            found.append(whole)
        return whole

    monkeypatch.setattr(runner, "open_whole_decode", noted)
    yield found
    found.clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_same_bits_in_any_batch(family: str) -> None:
    loaded = opened(FAMILIES[family])
    config = EngineConfig("", kv_memory=256 << 20, prefix_cache=False, batch_invariant=True)
    wanted = prompts(tokens=40)  # long enough to be pre-empted: at most 64 rows begin in a step
    expected = alone(loaded, config, wanted)
    for name, scenario in SCENARIOS.items():
        got = scenario(loaded, config, wanted)
        for request in wanted:
            ours, theirs = got[request.id], expected[request.id]
            assert ours.tokens == theirs.tokens, f"{name}: {request.id}"
            for position, logits in theirs.logits.items():
                same = mx.array_equal(ours.logits[position], logits).item()
                assert same, f"{name}: {request.id} at {position}"


def test_rows_turn_by_their_positions(
    wholes: list[WholeDecode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a picture they are not the tokens' numbers, behind a video they may be fractions."""
    loaded = replace(opened(FAMILIES["qwen3_moe"]), fingerprint="half as far")

    def half(model: LanguageModel, tokens: tuple[int, ...], media: object) -> Any:
        return np.tile(np.arange(len(tokens), dtype=np.float32) / 2, (3, 1))

    monkeypatch.setattr(type(loaded.model), "positions", half)
    config = EngineConfig("", kv_memory=256 << 20, prefix_cache=False)
    Company(loaded, config).run(prompts([90, 91], tokens=4))
    (whole,) = wholes
    assert whole.verified
    assert all(whole.verified.values())


def served(loaded: LoadedModel, requests: list[Request]) -> dict[str, Generated]:
    config = EngineConfig("", kv_memory=256 << 20, prefix_cache=False)
    return Company(loaded, config).run(requests)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_compute_what_the_model_does(
    family: str, wholes: list[WholeDecode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of rows against the model's own way; tokens and logits against MLX alone."""
    loaded = opened(FAMILIES[family])
    counts = [1 << n for n in range(MOST_ROWS.bit_length())]
    answers: dict[str, Generated] = {}
    asked: dict[str, Request] = {}
    for streams in counts:
        own = [
            Request(f"{streams}-{each.id}", each.prompt, each.sampling, max_tokens=TOKENS)
            for each in prompts([3 + 7 * n % 150 for n in range(streams)], seed=streams)
        ]
        asked |= {each.id: each for each in own}
        config = EngineConfig("", kv_memory=256 << 20, prefix_cache=False)
        if not wholes:
            company = Company(loaded, config)
        answers |= company.run(own)
    (whole,) = wholes
    assert whole.verified == {(KVFormat(), count): True for count in counts}

    monkeypatch.setattr(runner, "open_whole_decode", lambda *arguments, batch_invariant: None)
    monkeypatch.setattr(runner, "open_backends", lambda: Backends([ReferenceBackend()]))
    monkeypatch.setattr(current_device(), "operations", Operations())
    for name in ("1-r0", "2-r1", "8-r5", "32-r20", "64-r63"):
        tokens, prompt = answers[name].tokens, asked[name].prompt
        forced = [
            Request(f"{n}", (*prompt, *tokens[:n]), SamplingParams(temperature=0), max_tokens=1)
            for n in range(len(tokens))
        ]
        expected = served(loaded, forced)
        for n, token in enumerate(tokens):
            (theirs,) = expected[f"{n}"].logits.values()
            (ours,) = [
                logits
                for position, logits in answers[name].logits.items()
                if position == len(prompt) + n
            ]
            spread = mx.std(theirs).item()
            below = (theirs.max() - theirs[token]).item()
            assert below <= NEAR * spread, f"{name}, token {n}: {below / spread:.3f} deviations"
            error = (mx.linalg.norm(ours - theirs) / mx.linalg.norm(theirs)).item()
            assert error < 0.1, f"{name}, token {n}: logits differ by {error:.2g}"
