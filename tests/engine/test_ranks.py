"""A model split over processes gives what one process gives."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.core.config import DiskConfig, EngineConfig
from quire.core.errors import ModelError
from quire.core.request import Output, Request, SamplingParams
from quire.engine.ranks import check_split
from quire.serving.engine_client import ProcessEngine
from quire.serving.ticket import Ticket
from tests.support.families import CONFIGS
from tests.support.tiny_models import write_model

TOKENS = 12
LENGTHS = (5, 40, 130)


def requests() -> list[Request]:
    """Greedy ones, one that is sampled, and one that a grammar binds."""
    rng = random.Random(1)
    made = [
        Request(
            f"r{number}",
            tuple(rng.randrange(3, 100) for _ in range(length)),
            SamplingParams(temperature=0, logprobs=2),
            max_tokens=TOKENS,
        )
        for number, length in enumerate(LENGTHS)
    ]
    drawn = SamplingParams(temperature=1, seed=3, logprobs=0)
    return [*made, Request("drawn", made[1].prompt, drawn, max_tokens=TOKENS)]


async def outputs(ticket: Ticket) -> list[Output]:
    return [output async for output in ticket]


async def answers(folder: Path, ranks: int) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of `requests`, by an engine of so many processes."""
    config = EngineConfig(str(folder), ranks=ranks, kv_memory=32 << 20, dtype="float32")
    engine = await ProcessEngine.start(config, "warning")
    found = []
    try:
        for ticket in engine.submit(requests()):
            steps = await outputs(ticket)
            assert steps[-1].error is None, steps[-1].error
            tokens = [token for step in steps for token in step.token_ids]
            found.append((tokens, [each.logprob for step in steps for each in step.logprobs]))
    finally:
        await engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "changes"),
    [
        ("llama", 2, {}),
        ("llama", 4, {"num_key_value_heads": 2, "vocab_size": 201}),
        ("qwen3", 2, {}),
        ("gemma2", 2, {}),
        ("gemma3_text", 2, {}),
        ("gemma3_text", 2, {"tie_word_embeddings": True}),
        ("qwen2_moe", 2, {}),
        ("qwen3_moe", 2, {}),
    ],
)
async def test_a_split_model_gives_the_tokens_of_one_process(
    tmp_path: Path, name: str, ranks: int, changes: dict[str, Any]
) -> None:
    folder = write_model(tmp_path, CONFIGS[name] | changes)
    alone, split = await answers(folder, 1), await answers(folder, ranks)
    for one, other in zip(alone, split, strict=True):
        assert one[0] == other[0]
        assert other[1] == pytest.approx(one[1], abs=1e-4)


@pytest.mark.slow
async def test_a_process_that_dies_ends_the_engine(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIGS["llama"])
    engine = await ProcessEngine.start(EngineConfig(str(folder), ranks=2), "warning")
    (leader,) = [
        each for each in psutil.Process().children() if "quire.engine.worker" in each.cmdline()
    ]
    (follower,) = leader.children()
    endless = Request("r", (5, 6, 7), SamplingParams(temperature=0), max_tokens=1000)
    (ticket,) = engine.submit([endless])
    follower.kill()
    async with asyncio.timeout(20):  # it is told of, not waited for without end
        end = (await outputs(ticket))[-1]
    assert end.error is not None
    assert end.error.status == 503
    await engine.close()
    assert not leader.is_running()


@pytest.mark.slow
async def test_followers_end_with_the_leading_process(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIGS["llama"])
    engine = await ProcessEngine.start(EngineConfig(str(folder), ranks=2), "warning")
    (leader,) = [
        each for each in psutil.Process().children() if "quire.engine.worker" in each.cmdline()
    ]
    (follower,) = leader.children()
    leader.kill()
    psutil.wait_procs([follower], timeout=20)
    assert not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE
    await engine.close()


def test_a_disk_tier_is_refused() -> None:
    config = EngineConfig("", ranks=2, disk=DiskConfig("/nowhere", 1 << 30))
    with pytest.raises(ModelError, match="no disk tier"):
        check_split(config)
