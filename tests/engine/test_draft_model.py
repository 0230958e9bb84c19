"""A draft model drafts for all sequences at once, in pools of its own, and changes no answer."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import product

import mlx.core as mx
import pytest

from quire.cache.blocks import PoolKey
from quire.cache.pools import Pools
from quire.cache.specs import KVLayout
from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.request import Request
from quire.engine.draft_model import ModelDrafter
from quire.executor.factory import open_executor
from quire.models.weights.loader import LoadedModel
from quire.scheduler.draft_lengths import EveryDraft
from quire.scheduler.drafts import DraftQuery
from tests.engine.test_speculation import FORMATS, SAMPLED
from tests.support.everyday import everyday
from tests.support.opened import Open
from tests.support.parity import Company, assert_same, prompts
from tests.support.tiny_models import CONFIGS

BUDGET = 64 << 20


def drafted(
    loaded: LoadedModel,
    config: EngineConfig,
    draft: LoadedModel,
    wanted: list[Request],
    budget: int = BUDGET,
) -> tuple[Company, ModelDrafter]:
    """Serves requests beside each other with a draft model."""
    executor = open_executor(draft, EngineConfig("", block_size=config.block_size))
    drafter = ModelDrafter(draft, executor, budget, config.block_size, read_s=1.0)
    company = Company(loaded, replace(config, speculate="draft"), (drafter,), EveryDraft())
    company.run(wanted, every=3)
    return company, drafter


def settings(loaded: LoadedModel, format: KVFormat = KVFormat()) -> EngineConfig:  # noqa: B008
    return EngineConfig(
        str(loaded.path), kv_memory=BUDGET, kv_format=format, block_size=32, kv_skip_layers=()
    )


@pytest.mark.parametrize(
    ("family", "draft", "format"),
    everyday(
        [*product(CONFIGS, ("llama",), FORMATS), *product(("llama",), CONFIGS, FORMATS[:1])],
        lambda family, draft, format: (
            (family, draft, format.name) == ("gemma4_ple", "llama", "page-4")
        ),
    ),
    ids=lambda each: getattr(each, "name", each),
)
def test_another_model_changes_no_token(
    opened: Open, family: str, draft: str, format: KVFormat
) -> None:
    loaded = opened(family)
    wanted = prompts((3, 32, 40), tokens=24)
    plain = Company(loaded, settings(loaded, format)).run(wanted, every=3)
    company, _ = drafted(loaded, settings(loaded, format), opened(draft), wanted)
    assert_same(company.answers, plain, [each.id for each in wanted])
    assert dict(company.engine.stats().drafts)["draft"] > 40


@pytest.mark.parametrize("family", everyday(CONFIGS, "qwen3_5".__eq__))
def test_a_model_that_drafts_for_itself_is_always_right(opened: Open, family: str) -> None:
    """Greedy and sampled: drafts are sampled with the randomness of their positions."""
    loaded = opened(family)
    config = settings(loaded)
    wanted = [
        replace(each, sampling=params, min_tokens=0)
        for each, params in zip(prompts((3, 70), tokens=40), SAMPLED[:2], strict=True)
    ]
    wanted.append(replace(prompts((40,), tokens=40, seed=1)[0], id="greedy"))
    off = Company(loaded, config)
    plain = off.run(wanted, every=3)
    company, _ = drafted(loaded, config, loaded, wanted)
    for each in wanted:
        assert company.answers[each.id].tokens == plain[each.id].tokens
    stats = company.engine.stats()
    assert dict(stats.accepted_drafts) == dict(stats.drafts)
    assert stats.steps < 0.5 * off.engine.stats().steps


def test_little_room_makes_it_draft_for_some_only(opened: Open) -> None:
    """Sequences that were drafted longest ago give way; nothing fails, and nothing is left over."""
    loaded = opened("llama")
    config = settings(loaded)
    wanted = prompts((100, 120, 140, 300), tokens=30)
    plain = Company(loaded, config).run(wanted, every=3)
    groups = KVLayout.of(loaded.model.layout).groups
    block = Pools(groups, 32, mx.float32).block_bytes(PoolKey(0, KVFormat()))
    company, drafter = drafted(loaded, config, loaded, wanted, budget=6 * block)
    assert_same(company.answers, plain, [each.id for each in wanted])
    assert dict(company.engine.stats().drafts)["draft"] > 0
    assert drafter._manager.capacity.claimed <= 6 * block
    assert not drafter._followed


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_sequence_without_a_new_token_is_not_drafted_again(opened: Open, family: str) -> None:
    """The planner asks twice at one token if the drafts' step had no room for the sequence."""
    loaded = opened(family)
    executor = open_executor(loaded, EngineConfig("", block_size=32))
    drafter = ModelDrafter(loaded, executor, BUDGET, block_size=32, read_s=1.0)
    request = prompts((20,), tokens=24)[0]

    def drafts(tokens: array[int]) -> tuple[int, ...]:
        (draft,) = drafter.propose([DraftQuery(7, request, tokens, tokens, None, 0, limit=4)])
        return () if draft is None else draft.tokens

    tokens = array("i", request.prompt)
    first = drafts(tokens)
    assert len(first) == 4
    assert drafts(tokens) == ()
    tokens.append(first[0])
    assert drafts(tokens)[:3] == first[1:]


def test_sampled_penalised_answers_are_the_same(opened: Open) -> None:
    loaded = opened("qwen3_5")
    config = settings(loaded)
    wanted = [
        replace(each, sampling=params)
        for each, params in zip(prompts((5, 30, 64, 70, 12, 33), tokens=12), SAMPLED, strict=True)
    ]
    plain = Company(loaded, config).run(wanted)
    company, _ = drafted(loaded, config, opened("llama"), wanted)
    for each in wanted:
        assert company.answers[each.id].tokens == plain[each.id].tokens
