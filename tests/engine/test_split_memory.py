"""Two processes of a split model hold twice the keys and values in one budget each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.cache.blocks import PoolKey
from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.models.weights.loader import open_model
from tests.support.lockstep import Lockstep
from tests.support.parity import Company, prompts
from tests.support.registered import CONFIGS
from tests.support.tiny_models import write_model

BLOCKS = 8
"""Blocks that the budget holds in one process."""
WANTED = prompts((50,) * BLOCKS, 32)
"""Each fills a block and grows into a second one."""


LAYERED = CONFIGS["llama"] | {"num_hidden_layers": 2}
POOL = PoolKey(0, KVFormat())


def most_blocks(company: Company) -> int:
    """Serve the requests; return the most blocks that they held at once."""
    for request in WANTED:
        company.add(request)
    most = 0
    while company.engine.has_work:
        company.step()
        used = sum(count for _, count in company.engine.stats().kv_used)
        most = max(most, used // company.engine._executor.block_bytes(POOL))
    return most


@pytest.mark.parametrize(
    "pipeline", [(), pytest.param((1, 1), marks=pytest.mark.slow)], ids=["each layer", "by layers"]
)
def test_twice_the_blocks_in_the_same_budget(tmp_path: Path, pipeline: tuple[int, ...]) -> None:
    config = EngineConfig(str(write_model(tmp_path, LAYERED)), prefix_cache=False)
    loaded = open_model(config.model, dtype="float32")
    probe = Company(loaded, replace(config, kv_memory=64 << 20))
    block = probe.engine._executor.block_bytes(POOL)
    config = replace(config, kv_memory=BLOCKS * block)

    one = Company(loaded, config)
    assert most_blocks(one) == BLOCKS
    assert one.engine.stats().preemptions > 0

    made = Lockstep(config.model, 2, pipeline, dtype="float32")
    two = Company(made.loaded, config, open_executor=made.open_executor)
    assert most_blocks(two) == 2 * BLOCKS
    assert two.engine.stats().preemptions == 0
