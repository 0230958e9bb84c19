"""The KV budget, the context that it allows, and what a process holds after many prompts."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import Block, PoolKey
from quire.core.config import EngineConfig
from quire.core.errors import ModelError
from quire.core.kv_format import KVFormat
from quire.core.request import Request, SamplingParams
from quire.device.device import current_device
from quire.engine import memory
from quire.engine.factory import open_engine
from quire.engine.memory import check_context, kv_budget, open_blocks
from quire.engine.warm_up import _own_engine
from quire.executor.executor import Executor
from quire.models.weights.loader import open_model
from tests.support.tiny_models import tiny_model


def test_the_budget_is_what_was_asked_for_or_a_share_of_what_is_free() -> None:
    assert kv_budget(EngineConfig("", kv_memory=12345), 0) == 12345
    free = current_device().free_memory()
    assert 0 < kv_budget(EngineConfig(""), 0) < free


def executor_of(*, in_place: bool) -> Executor:
    """Return what tells about pools, whose blocks have a byte each."""
    told = {"block_bytes": lambda key: 1, "grows_in_place": lambda key, budget: in_place}
    return cast(Executor, SimpleNamespace(**told))


@pytest.mark.parametrize(("prefix_cache", "blocks"), [(True, 125), (False, 16)])
def test_pools_claim_much_at_first_only_for_a_prefix_cache(
    prefix_cache: bool, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of warm-up have none: the next engine asked for memory that they had claimed."""
    monkeypatch.setattr(current_device(), "kv_first", 0.125)
    config, key = EngineConfig("", prefix_cache=prefix_cache), PoolKey(0, KVFormat())
    manager = open_blocks(config, 1000, executor_of(in_place=False), disk=None)
    assert manager.allocate(key, 1) is not None
    assert manager.capacity.pool(key).capacity == blocks


@pytest.mark.parametrize(
    ("in_place", "capacities"), [(True, [125, 250, 375]), (False, [500, 1000, 2000])]
)
def test_pools_that_grow_in_place_take_equal_parts(
    monkeypatch: pytest.MonkeyPatch, capacities: list[int], *, in_place: bool
) -> None:
    monkeypatch.setattr(current_device(), "kv_first", 0.125)
    manager = open_blocks(EngineConfig(""), 4000, executor_of(in_place=in_place), disk=None)
    pool, found = manager.capacity.pool(PoolKey(0, KVFormat())), list[int]()
    for _ in capacities:
        assert manager.allocate(pool.key, len(pool.free) + 1) is not None
        found.append(pool.capacity)
    assert found == capacities


def test_engines_of_warm_up_claim_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_device(), "kv_first", 0.125)
    folder = str(tiny_model(tmp_path, "llama"))
    claimed, budget = list[int](), 64 << 20

    class Watched(BlockManager):
        def allocate(self, key: PoolKey, count: int) -> list[Block] | None:
            found = super().allocate(key, count)
            claimed.append(self.capacity.claimed)
            return found

    monkeypatch.setattr(memory, "BlockManager", Watched)
    engine = _own_engine(open_model(folder), EngineConfig(folder, kv_memory=budget))
    engine.add(Request("r", (1, 2, 3), max_tokens=2))
    while engine.has_work:
        engine.step()
    assert claimed
    assert max(claimed) < budget // 16


def test_more_than_is_free_is_refused_with_both_numbers() -> None:
    with pytest.raises(ModelError, match=r"1126 TB were requested, but only [\d.]+ .B are"):
        kv_budget(EngineConfig("", kv_memory=1 << 50), 0)


def test_a_context_too_short_to_be_of_use_is_refused() -> None:
    assert check_context(256, 4096) == 256
    with pytest.raises(ModelError, match="context of 255 tokens; at least 256"):
        check_context(255, 4096)


def test_a_short_context_that_was_asked_for_is_served() -> None:
    assert check_context(100, 100) == 100
    with pytest.raises(ModelError, match="context of 99 tokens; at least 100"):
        check_context(99, 100)


def test_a_context_that_the_model_is_not_made_for_is_refused_with_both_numbers(
    tmp_path: Path,
) -> None:
    folder = str(tiny_model(tmp_path, "llama"))
    made_for = open_engine(EngineConfig(folder)).info.context_length
    assert open_engine(EngineConfig(folder, max_context=made_for)).info.context_length == made_for
    with pytest.raises(ModelError, match=r"max_context: 999,999 tokens .* supports [\d,]+"):
        open_engine(EngineConfig(folder, max_context=999_999))
    with pytest.raises(ModelError, match=r"max_context: 10 tokens .* at least 64; set it higher"):
        open_engine(EngineConfig(folder, max_context=10))


@pytest.mark.slow
def test_a_thousand_prompts_later_the_first_is_served_again_and_memory_is_flat(
    tmp_path: Path,
) -> None:
    folder = tiny_model(tmp_path, "gemma4")
    engine = open_engine(EngineConfig(str(folder), dtype="float32", kv_memory=6 << 20))
    process, rng = psutil.Process(), random.Random(0)
    prompts = [tuple(rng.randrange(3, 250) for _ in range(100)) for _ in range(1000)]
    answers: dict[str, list[int]] = {}
    cached: dict[str, int] = {}

    def serve(requests: dict[str, tuple[int, ...]]) -> None:
        for name, prompt in requests.items():
            answers[name] = []
            engine.add(Request(name, prompt, SamplingParams(temperature=0), max_tokens=2))
        while engine.has_work:
            for output in engine.step():
                answers[output.request_id] += output.token_ids
                cached[output.request_id] = output.cached_tokens
                assert output.error is None

    for start in range(0, 300, 20):
        serve({f"r{n}": prompts[n] for n in range(start, start + 20)})
    before = process.memory_info().rss
    for start in range(300, 1000, 20):
        serve({f"r{n}": prompts[n] for n in range(start, start + 20)})
    assert process.memory_info().rss < before + (16 << 20)
    serve({"again": prompts[0]})
    serve({"warm": prompts[0]})
    assert answers["again"] == answers["warm"] == answers["r0"]
    assert (cached["again"], cached["warm"]) == (0, 99)
