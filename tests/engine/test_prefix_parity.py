"""A hit changes nothing: warm and cold runs give the same tokens and logits, for every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.models.weights.loader import LoadedModel, open_model
from tests.support.parity import Company, alone, assert_same, prompts
from tests.support.tiny_models import CONFIGS, tiny_model

Opened = tuple[LoadedModel, EngineConfig]
LONG = prompts((200,), tokens=12)[0]
OTHER = prompts((200,), tokens=12, seed=9)[0].prompt


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    known: dict[str, Opened] = {}

    def find(name: str) -> Opened:
        if name not in known:
            folder = tiny_model(Path(tmp_path_factory.mktemp(name)), name)
            known[name] = (
                open_model(str(folder), dtype="float32"),
                EngineConfig(str(folder), kv_memory=64 << 20),
            )
        return known[name]

    return find


def parted(at: int) -> tuple[int, ...]:
    """Return the long prompt up to a token, then something else."""
    return LONG.prompt[:at] + OTHER[at:150] + OTHER[:20]


FOLLOWERS: dict[str, tuple[tuple[int, ...], int]] = {
    # name: (prompt, tokens that must at least be reused where blocks are plain)
    "exact repeat": (LONG.prompt, 199),
    "extended": (LONG.prompt + OTHER[:40], 200),
    "parted in the middle of a page": (parted(100), 100),
    "parted before the window": (parted(130), 130),
    "parted at a page's end": (parted(128), 128),
    "a shorter beginning": (LONG.prompt[:90], 89),
}


DAILY = ("gemma4_ple", "qwen3_5")
"""The families of every day; of the first all followers, of others those of `LATER`."""
FAMILIES = [pytest.param(n, marks=() if n in DAILY else pytest.mark.slow) for n in CONFIGS]
LATER = (("qwen3_5", "parted in the middle of a page"), ("llama", "parted in the middle of a page"))
CASES = [
    pytest.param(*case, marks=() if case[0] == DAILY[0] or case in LATER else pytest.mark.slow)
    for case in product(CONFIGS, FOLLOWERS)
]


def follower(name: str) -> Request:
    return replace(LONG, id="second", prompt=FOLLOWERS[name][0])


@pytest.mark.parametrize(("family", "name"), CASES)
def test_warm_equals_cold(opened: Callable[[str], Opened], family: str, name: str) -> None:
    loaded, config = opened(family)
    wanted = follower(name)
    expected = alone(loaded, config, [wanted])
    company = Company(loaded, config)
    company.run([LONG])
    company.run([wanted])
    assert_same(company.answers, expected, [wanted.id])
    reused = company.answers["second"].ends[0].cached_tokens
    # A recurrent state is kept at some positions only; elsewhere reuse is to the very token.
    if "qwen3_5" in family:
        assert reused >= (199 if name == "exact repeat" else 0)
    else:
        assert reused >= FOLLOWERS[name][1]


def test_the_third_prompt_that_parts_within_a_message_reuses_recurrent_state(
    opened: Callable[[str], Opened],
) -> None:
    loaded, config = opened("qwen3_5")
    wanted = [
        replace(LONG, id=f"question {n}", prompt=LONG.prompt[:100] + OTHER[n : n + 40])
        for n in range(3)
    ]
    expected = alone(loaded, config, wanted)
    company = Company(loaded, config)
    for each in wanted:
        company.run([each])
    assert_same(company.answers, expected, [each.id for each in wanted])
    reused = [company.answers[each.id].ends[0].cached_tokens for each in wanted]
    assert reused == [0, 0, 100]


@pytest.mark.parametrize("family", FAMILIES)
def test_warm_beside_cold(opened: Callable[[str], Opened], family: str) -> None:
    loaded, config = opened(family)
    wanted = [follower("parted in the middle of a page"), *prompts((70, 7), tokens=12, seed=5)]
    expected = alone(loaded, config, wanted)
    company = Company(loaded, replace(config, max_step_tokens=50))
    company.run([LONG])
    company.run(wanted)
    assert_same(company.answers, expected, [request.id for request in wanted])


@pytest.mark.parametrize("family", FAMILIES)
def test_those_who_arrive_together_share_one_computation(
    opened: Callable[[str], Opened], family: str
) -> None:
    loaded, config = opened(family)
    wanted = [replace(LONG, id=f"same{number}") for number in range(4)]
    (answer,) = alone(loaded, config, [LONG]).values()
    expected = {request.id: answer for request in wanted}
    company = Company(loaded, replace(config, max_step_tokens=64))
    company.run(wanted)
    assert_same(company.answers, expected, [request.id for request in wanted])
    shared = [company.answers[request.id].ends[0].cached_tokens for request in wanted]
    least = 128 if "qwen3_5" in family else 192
    assert sorted(shared)[0] == 0
    assert all(tokens >= least for tokens in sorted(shared)[1:]), shared


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cancelled_prefill_counts(opened: Callable[[str], Opened], family: str) -> None:
    loaded, config = opened(family)
    wanted = replace(LONG, id="second")
    expected = alone(loaded, config, [wanted])
    company = Company(loaded, replace(config, max_step_tokens=50))
    company.add(LONG)
    for _ in range(4):
        company.step()
    company.engine.abort(LONG.id)
    company.run([wanted])
    assert_same(company.answers, expected, [wanted.id])
    assert company.answers["second"].ends[0].cached_tokens >= 100
