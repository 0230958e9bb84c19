"""A model split over processes gives what one process gives."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.core.config import DiskConfig, EngineConfig
from quire.core.errors import ModelError
from quire.core.hosts import Host, Hosts
from quire.core.request import Output, Request, SamplingParams
from quire.engine.ranks import check_split
from quire.serving.engine_client import ProcessEngine
from quire.serving.ticket import Ticket
from tests.support.families import CONFIGS
from tests.support.tiny_models import write_model
from tests.support.waiting import HANG_S

TOKENS = 12
LENGTHS = (5, 40, 130)


def requests() -> list[Request]:
    """Return greedy ones, one that is sampled, and one that a grammar binds."""
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


async def answers(
    folder: Path,
    ranks: int,
    hosts: Hosts | None = None,
    pipeline: tuple[int, ...] | None = None,
) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probabilities of `requests`, by an engine of so many processes."""
    config = EngineConfig(
        str(folder),
        ranks=ranks,
        hosts=hosts,
        pipeline=pipeline,
        kv_memory=32 << 20,
        dtype="float32",
    )
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
        ("qwen3_moe", 2, {}),
        ("falcon_h1", 2, {}),
        ("gemma3n_text", 2, {}),
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
@pytest.mark.parametrize("pipeline", [(3, 1), ()], ids=["in proportions", "by memory"])
async def test_a_model_split_by_layers_gives_the_tokens_of_one_process(
    tmp_path: Path, pipeline: tuple[int, ...]
) -> None:
    folder = write_model(tmp_path, CONFIGS["gemma3_text"])
    alone, split = await answers(folder, 1), await answers(folder, 2, pipeline=pipeline)
    for one, other in zip(alone, split, strict=True):
        assert one[0] == other[0]
        assert other[1] == pytest.approx(one[1], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [None, (1, 1)], ids=["each layer", "by layers"])
async def test_prefixes_are_read_from_disk_after_a_restart(
    tmp_path: Path, pipeline: tuple[int, ...] | None
) -> None:
    """Blocks that one process lost are computed and written again."""
    folder = write_model(tmp_path / "model", CONFIGS["gemma3_text"])
    disk = DiskConfig(str(tmp_path / "disk"), 64 << 20)
    config = EngineConfig(
        str(folder), ranks=2, pipeline=pipeline, kv_memory=32 << 20, dtype="float32", disk=disk
    )
    wanted = requests()[2]

    async def ask() -> tuple[list[int], int]:
        engine = await ProcessEngine.start(config, "warning")
        try:
            (ticket,) = engine.submit([wanted])
            steps = await outputs(ticket)
        finally:
            await engine.close()
        assert steps[-1].error is None, steps[-1].error
        return [token for step in steps for token in step.token_ids], steps[-1].cached_tokens

    first, again = await ask(), await ask()
    shutil.rmtree(tmp_path / "disk" / "rank-1-of-2")
    lost, written = await ask(), await ask()
    assert [tokens for tokens, _ in (again, lost, written)] == [first[0]] * 3
    assert [cached for _, cached in (first, again, lost, written)] == [0, 128, 0, 128]


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [None, (1, 1)], ids=["each layer", "by layers"])
async def test_a_draft_model_runs_in_the_first_process(
    tmp_path: Path, pipeline: tuple[int, ...] | None
) -> None:
    folder = str(write_model(tmp_path, CONFIGS["llama"]))
    config = EngineConfig(
        folder, ranks=2, pipeline=pipeline, speculate="draft", draft_model=folder, dtype="float32"
    )
    engine = await ProcessEngine.start(replace(config, kv_memory=32 << 20), "warning")
    try:
        (ticket,) = engine.submit(requests()[1:2])
        steps = await outputs(ticket)
        assert dict((await engine.stats()).drafts)["draft"] > 0
    finally:
        await engine.close()
    tokens = [token for step in steps for token in step.token_ids]
    assert tokens == (await answers(Path(folder), 1))[1][0]


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an ssh that runs each command here and notes the machine; returns the file of its
    notes.
    """
    notes, script = tmp_path / "reached", tmp_path / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\n"
        'while [ "$1" = -o ]; do shift 2; done\n'
        f'echo "$1" >> {notes}\n'
        'exec sh -c "exec $2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return notes


@pytest.mark.slow
async def test_hosts_are_reached_by_ssh(tmp_path: Path, fake_ssh: Path) -> None:
    here, there = (Host(name, ("127.0.0.1",)) for name in ("127.0.0.1", "elsewhere"))
    folder = write_model(tmp_path / "model", CONFIGS["llama"])
    split = await answers(folder, 2, Hosts((here, there), "ring", ("QUIRE_EXAMPLE=a b",)))
    assert fake_ssh.read_text() == "elsewhere\n"
    for one, other in zip(await answers(folder, 1), split, strict=True):
        assert one[0] == other[0]


@pytest.mark.slow
async def test_each_process_says_how_long_the_same_work_takes(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIGS["llama"])
    engine = await ProcessEngine.start(EngineConfig(str(folder), ranks=2), "warning")
    try:
        (ticket,) = engine.submit(requests()[:1])
        await outputs(ticket)
        async with asyncio.timeout(HANG_S):
            while not all((await engine.stats()).work_seconds):
                await asyncio.sleep(0.05)
        assert len((await engine.stats()).work_seconds) == 2
    finally:
        await engine.close()


@pytest.mark.slow
@pytest.mark.timeout(2 * HANG_S)
async def test_a_slow_process_stands_out(tmp_path: Path) -> None:
    """The second process is stopped most of the time."""
    folder = write_model(tmp_path, CONFIGS["llama"] | {"vocab_size": 60_000, "hidden_size": 512})
    engine = await ProcessEngine.start(EngineConfig(str(folder), ranks=2), "warning")
    (leader,) = [
        each for each in psutil.Process().children() if "quire.engine.worker" in each.cmdline()
    ]
    (follower,) = leader.children()

    async def slow_down() -> None:
        while True:
            follower.suspend()
            await asyncio.sleep(0.1)
            follower.resume()
            await asyncio.sleep(0.005)

    slowed = asyncio.create_task(slow_down())
    try:
        async with asyncio.timeout(HANG_S):
            seconds: tuple[float, ...] = ()
            while not seconds or not all(seconds) or seconds[1] < 3 * seconds[0]:
                (ticket,) = engine.submit(requests()[:1])
                await outputs(ticket)
                seconds = (await engine.stats()).work_seconds
    finally:
        slowed.cancel()
        follower.resume()
        await engine.close()


@pytest.mark.slow
async def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    here, there = (Host(name, ("127.0.0.1",)) for name in ("127.0.0.1", "no.such.host.invalid"))
    folder = write_model(tmp_path, CONFIGS["llama"])
    config = EngineConfig(str(folder), ranks=2, hosts=Hosts((here, there)))
    with pytest.raises(
        ModelError, match=r"on no\.such\.host\.invalid, ended before it had started"
    ):
        await ProcessEngine.start(config, "warning")


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [None, (1, 1)], ids=["each layer", "by layers"])
async def test_a_process_that_dies_ends_the_engine(
    tmp_path: Path, pipeline: tuple[int, ...] | None
) -> None:
    folder = write_model(tmp_path, CONFIGS["llama"])
    config = EngineConfig(str(folder), ranks=2, pipeline=pipeline)
    engine = await ProcessEngine.start(config, "warning")
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


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"adapters": (("a", "/nowhere"),)}, "do not support adapters"),
        ({"speculate": "mtp"}, "do not support the model's own draft head"),
    ],
)
def test_settings_that_do_not_go_with_a_split_are_refused(
    changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        check_split(replace(EngineConfig("", ranks=2), **changes))


def test_more_processes_than_cards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.ranks.chosen_backend", lambda asked: "nccl")
    monkeypatch.setattr("quire.engine.ranks.count_cards", lambda: 2)
    with pytest.raises(
        ModelError, match="3 processes on this machine need a GPU each, and it has 2"
    ):
        check_split(EngineConfig("", ranks=3))
    check_split(EngineConfig("", ranks=2))
