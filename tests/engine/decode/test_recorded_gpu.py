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
from quire.engine.decode.served import MOST_ROWS
from quire.engine.decode.whole import WholeDecode, open_whole_decode
from quire.models.base import LanguageModel, named_parameters
from quire.models.loader import LoadedModel
from quire.scheduler.prefill_budget import PrefillBudget
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
CODED = 2.5
"""How much further logits may be over codes, some of which are others for numbers at an edge."""


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


@pytest.fixture
def recorded_prompts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The prompt rows of each recorded step that has any."""
    found: list[int] = []
    observe = PrefillBudget.observe

    def noted(
        self: PrefillBudget,
        decode_rows: int,
        chunks: int,
        prompt_rows: int,
        seconds: float,
        *,
        recorded: bool = False,
    ) -> None:
        if recorded and prompt_rows:
            found.append(prompt_rows)
        observe(self, decode_rows, chunks, prompt_rows, seconds, recorded=recorded)

    monkeypatch.setattr(PrefillBudget, "observe", noted)
    return found


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


def served(
    loaded: LoadedModel, requests: list[Request], config: EngineConfig
) -> dict[str, Generated]:
    return Company(loaded, config).run(requests)


def streams_of(counts: list[int]) -> dict[int, list[Request]]:
    """So many requests at a time."""
    return {
        streams: [
            Request(f"{streams}-{each.id}", each.prompt, each.sampling, max_tokens=TOKENS)
            for each in prompts([3 + 7 * n % 150 for n in range(streams)], seed=streams)
        ]
        for streams in counts
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_compute_what_the_model_does(
    family: str,
    wholes: list[WholeDecode],
    recorded_prompts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every number of rows against the model's own way; tokens and logits against MLX alone."""
    loaded = opened(FAMILIES[family])
    config = EngineConfig("", kv_memory=256 << 20, prefix_cache=False)
    counts = [1 << n for n in range(MOST_ROWS.bit_length())]
    company, asked = Company(loaded, config), streams_of(counts)
    for requests in asked.values():
        company.run(requests)
    (whole,) = wholes
    assert whole.verified == {(KVFormat(), count): True for count in counts}
    assert any(recorded_prompts)
    names = ["1-r0", "2-r1", "8-r5", "32-r20", "64-r63"]
    every = [each for requests in asked.values() for each in requests if each.id in names]
    assert_near_mlx(loaded, config, every, company.answers, 1, monkeypatch)


LONG = {"head_dim": 256, "global_head_dim": 512}
CODED_FAMILIES = FAMILIES | {
    "llama, heads of 128": FAMILIES["llama"] | {"head_dim": 128},
    "gemma4_moe, heads of 256 and 512": FAMILIES["gemma4_moe"] | LONG,
}


@pytest.mark.parametrize("family", CODED_FAMILIES)
@pytest.mark.parametrize(
    ("format", "skipped"),
    [
        (KVFormat("uniform", 4, 4), ()),
        (KVFormat("uniform", 8, 8), ()),
        (KVFormat("turbo", 4, 4), ()),
        (KVFormat("turbo", 3, 3), ()),
        (KVFormat("turbo", 3.5, 3.5), (1,)),
        (KVFormat("uniform", 4, 4), (0,)),
        (KVFormat("page", 4, 4), ()),
        (KVFormat("page", 8, 8), ()),
        (KVFormat("page", 8, 4), (1,)),
        (KVFormat("page", 6, 3), ()),
    ],
    ids=str,
)
def test_recorded_steps_read_and_write_codes(
    family: str,
    format: KVFormat,
    skipped: tuple[int, ...],
    wholes: list[WholeDecode],
    recorded_prompts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = opened(CODED_FAMILIES[family])
    memory = 256 << 20
    config = EngineConfig(
        "", kv_memory=memory, prefix_cache=False, kv_format=format, kv_skip_layers=skipped
    )
    counts = [1, 2, 8, 16]
    company, asked = Company(loaded, config), streams_of(counts)
    for requests in asked.values():
        company.run(requests)
    (whole,) = wholes
    stored = replace(format, skip_layers=skipped)
    assert whole.verified.items() >= {(stored, count): True for count in counts}.items()
    assert all(whole.verified.values())
    assert any(recorded_prompts)
    names = ["1-r0", "8-r5", "16-r14"]
    every = [each for requests in asked.values() for each in requests if each.id in names]
    assert_near_mlx(loaded, config, every, company.answers, CODED, monkeypatch)


def assert_near_mlx(
    loaded: LoadedModel,
    config: EngineConfig,
    asked: list[Request],
    answers: dict[str, Generated],
    further: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens and logits of requests against MLX alone, `further` times as far as plain ones."""
    monkeypatch.setattr(runner, "open_whole_decode", lambda *arguments, batch_invariant: None)
    monkeypatch.setattr(runner, "open_backends", lambda: Backends([ReferenceBackend()]))
    monkeypatch.setattr(current_device(), "operations", Operations())
    for request in asked:
        tokens, prompt, answer = answers[request.id].tokens, request.prompt, answers[request.id]
        forced = [
            Request(f"{n}", (*prompt, *tokens[:n]), SamplingParams(temperature=0), max_tokens=1)
            for n in range(len(tokens))
        ]
        expected = served(loaded, forced, config)
        for n, token in enumerate(tokens):
            (theirs,) = expected[f"{n}"].logits.values()
            ours = answer.logits[len(prompt) + n]
            spread = mx.std(theirs).item()
            below = (theirs.max() - theirs[token]).item()
            name = f"{request.id}, token {n}"
            assert below <= further * NEAR * spread, f"{name}: {below / spread:.3f} deviations"
            error = (mx.linalg.norm(ours - theirs) / mx.linalg.norm(theirs)).item()
            assert error < further * 0.1, f"{name}: logits differ by {error:.2g}"
