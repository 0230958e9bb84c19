"""Drafts change nothing: a scripted proposer, now right and now wrong, through the real engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.request import Request, SamplingParams
from quire.models.weights.loader import LoadedModel
from tests.support.everyday import everyday
from tests.support.opened import Open
from tests.support.parity import Company, Generated, assert_same, prompts

FORMATS = (KVFormat(), KVFormat("page", 4, 4), KVFormat("uniform", 8, 8))
# Full attention; a recurrent state; windows; layers that keep nothing themselves.
FAMILIES = ("llama", "qwen3_5", "gemma4", "gemma4_ple")


class Scripted:
    """Knows the answer, and falsifies some of it."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], seed: int) -> None:
        self._tokens = [*prompt, *answer]
        self._rng = random.Random(seed)
        self.right = self.wrong = 0

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        assert list(tokens) == self._tokens[: len(tokens)], "drafts changed the answer"
        drafts = self._tokens[len(tokens) :][: min(most, self._rng.randint(0, 5))]
        for place in range(len(drafts)):
            if self._rng.random() < 0.25:
                drafts[place] = (drafts[place] + 1) % 250
                self.wrong += 1
            else:
                self.right += 1
        return drafts


def run(
    loaded: LoadedModel, config: EngineConfig, wanted: list[Request], known: dict[str, Generated]
) -> tuple[Company, list[Scripted]]:
    """Serves requests beside each other, with drafts of answers that are known."""
    proposers: list[Scripted] = []

    def make(request: Request) -> Scripted:
        answer = known[request.id].tokens
        proposers.append(Scripted(request.prompt, answer, len(proposers)))
        return proposers[-1]

    company = Company(loaded, config, make)
    company.run(wanted, every=3)
    return company, proposers


DAILY = (("llama", "uniform-8-g64"), ("gemma4_ple", "page-4"), ("qwen3_5", "plain"))


def unbound(request: Request) -> Request:
    """Without a least length: answers that are bound get no drafts."""
    return replace(request, min_tokens=0)


@pytest.mark.parametrize(
    ("family", "format"),
    everyday(product(FAMILIES, FORMATS), lambda family, format: (family, format.name) in DAILY),
    ids=lambda each: getattr(each, "name", each),
)
def test_drafts_save_steps_and_change_no_token(opened: Open, family: str, format: KVFormat) -> None:
    loaded = opened(family)
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20, kv_format=format)
    # Prompts that end within a block and at its end; answers that fill blocks.
    wanted = [unbound(each) for each in prompts((3, 40, 64, 130), tokens=70)]
    plain = Company(loaded, config)
    plain.run(wanted, every=3)
    company, proposers = run(loaded, config, wanted, plain.answers)
    assert_same(company.answers, plain.answers, [request.id for request in wanted])
    assert all(each.right > 10 and each.wrong > 5 for each in proposers)
    assert company.engine.stats().steps < plain.engine.stats().steps


SAMPLED = (
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.8, top_p=0.9, seed=8, logprobs=2),
    SamplingParams(temperature=0, presence_penalty=0.7, frequency_penalty=0.9),
    SamplingParams(temperature=0, repetition_penalty=1.8),
)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_seeded_and_penalised_answers_are_the_same(opened: Open, family: str) -> None:
    loaded = opened(family)
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20)
    lengths = (5, 30, 64, 70)
    wanted = [
        replace(unbound(request), sampling=params)
        for request, params in zip(prompts(lengths, tokens=36), SAMPLED, strict=True)
    ]
    plain = Company(loaded, config)
    plain.run(wanted)
    company, proposers = run(loaded, config, wanted, plain.answers)
    for request in wanted:
        assert company.answers[request.id].tokens == plain.answers[request.id].tokens
    assert sum(each.right for each in proposers) > 50
    assert sum(each.wrong for each in proposers) > 20


@pytest.mark.parametrize("family", everyday(FAMILIES, lambda family: family == "qwen3_5"))
def test_what_was_drafted_is_reused_and_survives_pre_emption(opened: Open, family: str) -> None:
    loaded = opened(family)
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20, block_size=16)
    wanted = prompts((3, 40, 64, 130), tokens=60)
    plain = Company(loaded, config)
    plain.run(wanted)
    budget = plain.engine.worst_case_bytes(config.kv_format, 250)
    company, _ = run(loaded, replace(config, kv_memory=budget), wanted, plain.answers)
    assert_same(company.answers, plain.answers, [request.id for request in wanted])
    assert company.engine.stats().preemptions > 0
    # Turn two of a conversation finds in the cache what drafts computed, and goes on as if alone.
    second = [
        replace(request, id=f"second {request.id}", prompt=(*request.prompt, *answer.tokens, 9))
        for request in wanted[:1]
        for answer in [plain.answers[request.id]]
    ]
    expected = Company(loaded, replace(config, prefix_cache=False)).run(second)
    company, _ = run(loaded, config, wanted[:1], plain.answers)
    company.engine._proposers = lambda request: None
    got = company.run(second)
    assert_same(got, expected, [request.id for request in second])
    assert got["second r0"].ends[0].cached_tokens >= 32
