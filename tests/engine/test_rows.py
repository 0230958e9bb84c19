"""The engine hands each row's parameters to the sampler and reads its tokens while steps overlap.

Each token is held against the logits that it was drawn from, by numpy.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from quire.core.config import EngineConfig
from quire.core.request import Output, Request, SamplingParams, TokenLogprobs
from quire.models.weights.loader import LoadedModel, open_model
from tests.sampling.reference import dry_penalties
from tests.support.parity import Company
from tests.support.tiny_models import tiny_model

TOKENS = 24
PENALISED = SamplingParams(
    temperature=0, presence_penalty=0.7, frequency_penalty=0.9, repetition_penalty=1.6
)
REPEATED = SamplingParams(temperature=0, repetition_penalty=2.5)
DRIED = SamplingParams(temperature=0, dry_multiplier=4.0, dry_allowed_length=1)
LIKELY = SamplingParams(temperature=0, logprobs=3)
CHOSEN = SamplingParams(temperature=1.2, seed=5, logprobs=0)


class Watched(Company):
    """Keeps the logprobs of each request too."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        super().__init__(loaded, config)
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        step = self.engine.step

        def keep() -> list[Output]:
            outputs = step()
            for output in outputs:
                self.logprobs.setdefault(output.request_id, []).extend(output.logprobs)
            return outputs

        self.engine.step = keep  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_model(Path(tmp_path_factory.mktemp("llama")), "llama")
    return open_model(str(folder), dtype="float32")


def requests() -> list[Request]:
    rng = random.Random(3)
    kinds = (PENALISED, SamplingParams(temperature=0), REPEATED, LIKELY, CHOSEN, PENALISED, DRIED)
    return [
        Request(
            f"r{number}",
            tuple(rng.randrange(3, 250) for _ in range(rng.choice((1, 30, 70)))),
            params,
            max_tokens=TOKENS,
        )
        for number, params in enumerate(kinds)
    ]


def penalised(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    prompt: tuple[int, ...],
    answer: list[int],
) -> npt.NDArray[np.float32]:
    """Return the formulas of OpenAI and of CTRL (arXiv:1909.05858), token by token."""
    out = logits.copy()
    for token in {*prompt, *answer}:
        value, penalty = out[token], params.repetition_penalty
        out[token] = value / penalty if value > 0 else value * penalty
    for token in set(answer):
        out[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
    repeats = dry_penalties([*prompt, *answer], params, len(out))
    return out - np.array(repeats, dtype=np.float32) if params.penalises_repeats else out


def check(company: Watched, request: Request) -> None:
    answer = company.answers[request.id]
    assert len(answer.tokens) == TOKENS
    for place, token in enumerate(answer.tokens):
        logits = np.array(answer.logits[len(request.prompt) + place])
        before = answer.tokens[:place]
        if request.sampling.temperature == 0:
            wanted = penalised(logits, request.sampling, request.prompt, before)
            best = int(np.argmax(wanted))
            assert token == best, f"{request.id}: token {place} ignores what came before"
        if request.sampling.logprobs is not None:
            check_logprobs(company.logprobs[request.id][place], token, logits, request)


def check_logprobs(
    said: TokenLogprobs, token: int, logits: npt.NDArray[np.float32], request: Request
) -> None:
    expected = logits - np.logaddexp.reduce(logits)
    count = request.sampling.logprobs or 0
    best = np.argsort(-expected, kind="stable")[:count]
    assert said.token_id == token
    assert said.logprob == pytest.approx(expected[token], abs=1e-4)
    assert [id for id, _ in said.top] == best.tolist()
    assert [value for _, value in said.top] == pytest.approx(expected[best].tolist(), abs=1e-4)


@pytest.mark.parametrize("every", [0, 3], ids=["together", "one by one"])
def test_penalties_see_every_token_and_logprobs_stay_with_their_row(
    loaded: LoadedModel, every: int
) -> None:
    company = Watched(loaded, EngineConfig(str(loaded.path), kv_memory=32 << 20))
    company.run(requests(), every=every)
    for request in requests():
        check(company, request)
    assert not company.logprobs["r0"]


def test_penalties_see_a_prompt_that_was_not_computed_again(loaded: LoadedModel) -> None:
    company = Watched(loaded, EngineConfig(str(loaded.path), kv_memory=32 << 20))
    company.run(requests())
    warm = [replace(request, id=f"warm {request.id}") for request in requests()]
    company.run(warm)
    for request in warm:
        check(company, request)


def test_penalties_and_logprobs_survive_pre_emption(loaded: LoadedModel) -> None:
    config = EngineConfig(str(loaded.path), kv_memory=32 << 20, block_size=16)
    probe = Watched(loaded, config).engine
    budget = probe._scheduler.limits.worst_case_bytes(config.kv_format, 256)
    company = Watched(loaded, replace(config, kv_memory=budget))
    company.run(requests())
    assert company.engine.stats().preemptions > 0
    for request in requests():
        check(company, request)
