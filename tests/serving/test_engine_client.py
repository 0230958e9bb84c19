"""The engine's process as the event loop sees it, with a real engine in it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from quire.core.config import EngineConfig
from quire.core.errors import EngineFailure, ModelError, NoRoom
from quire.core.frames import Frames, encode
from quire.core.messages import AskStats, Cached, Progress
from quire.core.request import FinishReason, Output, Request, SamplingParams
from quire.demo import MODEL_DIR
from quire.serving import engine_client
from quire.serving.engine_client import ProcessEngine
from quire.serving.ticket import Ticket
from tests.serving import closing_worker
from tests.support.waiting import HANG_S, wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (2, 5, 6, 7)
GREEDY = SamplingParams(temperature=0)


@dataclass
class Opened:
    """An engine that several tests use, and what it told while it was opened."""

    client: ProcessEngine
    told: list[Progress | None]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened() -> AsyncIterator[Opened]:
    told: list[Progress | None] = []
    config = EngineConfig(str(MODEL_DIR))
    engine = await ProcessEngine.start(config, "warning", on_progress=told.append)
    yield Opened(engine, told)
    await engine.close()


@pytest.fixture
def shared(opened: Opened) -> ProcessEngine:
    return opened.client


@pytest_asyncio.fixture(loop_scope="module")
async def client() -> AsyncIterator[ProcessEngine]:
    """Yield an engine of the test's own, which it may end."""
    engine = await ProcessEngine.start(EngineConfig(str(MODEL_DIR)), "warning")
    yield engine
    await engine.close()


def endless(name: str) -> Request:
    return Request(name, PROMPT, GREEDY, max_tokens=100_000, stop_token_ids=frozenset())


async def end_of(ticket: Ticket) -> Output:
    return [output async for output in ticket][-1]


def running(worker: str) -> psutil.Process:
    """Return the engine's process."""
    children = psutil.Process().children()
    (process,) = [child for child in children if worker in child.cmdline()]
    return process


async def test_opening_tells_how_far_it_has_come(opened: Opened) -> None:
    *stages, last = opened.told
    weights = [each for each in stages if each is not None and each.stage == "weights"]
    assert last is None
    assert None not in stages
    assert weights[0].done == 0 < weights[-1].done == weights[-1].total
    assert [each.done for each in weights] == sorted(each.done for each in weights)


async def test_a_model_that_cannot_be_opened() -> None:
    told: list[Progress | None] = []
    with pytest.raises(ModelError, match="nowhere"):
        await ProcessEngine.start(EngineConfig("/nowhere"), "warning", on_progress=told.append)
    assert told == [None]


async def test_requests_end_once_and_alike(shared: ProcessEngine) -> None:
    before = (await shared.stats()).generated_tokens
    assert shared.info.model_type in ("gemma4_text", "gemma4")
    requests = [Request(name, PROMPT, GREEDY, max_tokens=12) for name in "ab"]
    answers = []
    for ticket in shared.submit(requests):
        outputs = [output async for output in ticket]
        assert [output.finish for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        answers.append([token for output in outputs for token in output.token_ids])
    assert answers[0] == answers[1]
    generated = (await shared.stats()).generated_tokens - before
    assert generated == len(answers[0]) + len(answers[1])


class CountedPipe:
    """The client's end of a pipe, whose writes are counted, but for those of heartbeats."""

    _HEARTBEAT = encode(AskStats(engine_client._HEARTBEAT))

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self.writes = 0

    def send(self, data: bytes) -> int:
        self.writes += data != self._HEARTBEAT
        return self._pipe.send(data)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def close(self) -> None:
        self._pipe.close()


@pytest.mark.parametrize(("apart_s", "at_once"), [(0.0, 1), (0.002, 32)])
async def test_requests_wait_for_each_other_only_if_they_come_together(
    shared: ProcessEngine, monkeypatch: pytest.MonkeyPatch, apart_s: float, at_once: int
) -> None:
    await shared.stats()  # behind the first heartbeat
    pipe, now = CountedPipe(shared._pipe), 1e9
    monkeypatch.setattr(shared, "_pipe", pipe)
    monkeypatch.setattr(engine_client, "perf_counter", lambda: now)
    tickets = []
    for number in range(32):
        tickets += shared.submit([Request(f"r{number}", PROMPT, GREEDY, max_tokens=2)])
        now += apart_s
    assert pipe.writes == at_once  # the first waits for nothing
    for ticket in tickets:
        assert (await end_of(ticket)).error is None
    assert pipe.writes == max(2, at_once)


async def test_an_abort_ends_a_request_and_not_its_neighbour(shared: ProcessEngine) -> None:
    first, second = shared.submit([endless("a"), Request("b", PROMPT, GREEDY, max_tokens=40)])
    await anext(aiter(first))
    first.abort()
    first.abort()
    assert (await end_of(first)).finish is FinishReason.ABORT
    first.abort()
    assert (await end_of(second)).finish in (FinishReason.LENGTH, FinishReason.STOP)


async def test_a_dead_engine_fails_requests_in_flight(
    client: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.serving.engine_client._EXIT_S", HANG_S)
    (ticket,) = client.submit([endless("a")])
    await anext(aiter(ticket))
    psutil.Process(client._process.pid).kill()
    end = await end_of(ticket)
    assert end.finish is FinishReason.ERROR
    assert end.error is not None
    assert "signal 9" in end.error.message
    await client.broken.wait()
    assert client.failure is not None
    with pytest.raises(EngineFailure):
        client.submit([endless("b")])
    with pytest.raises(EngineFailure):
        await client.stats()


async def test_others_go_on_while_a_process_that_has_closed_its_pipe_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("quire.serving.engine_client._EXIT_S", HANG_S)
    closed = tmp_path / "closed"
    monkeypatch.setenv(closing_worker.CLOSED, str(closed))
    worker = closing_worker.__name__
    starting = asyncio.create_task(ProcessEngine.start(EngineConfig("x"), worker=worker))
    await asyncio.to_thread(wait_until, closed.exists)
    await asyncio.sleep(0)  # the loop reads the end of the pipe
    running(worker).kill()
    with pytest.raises(ModelError, match="signal 9"):
        await starting


async def test_closing_fails_requests_in_flight(client: ProcessEngine) -> None:
    (ticket,) = client.submit([endless("a")])
    await anext(aiter(ticket))
    await client.close()
    end = await end_of(ticket)
    assert end.error is not None
    assert "shutting down" in end.error.message
    assert not client.broken.is_set()
    await client.close()


async def test_an_answer_to_a_cancelled_question_costs_no_other_message(
    shared: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = asyncio.create_task(shared.cached())
    take = shared._take

    def taken(message: Any) -> None:
        if isinstance(message, Cached):
            question.cancel()  # in the turn of the event loop in which its answer is read
        take(message)

    monkeypatch.setattr(shared, "_take", taken)
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    try:
        with pytest.raises(asyncio.CancelledError):
            await question
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
    assert not faults


async def test_an_engine_asks_for_room_before_it_reads_weights(shared: ProcessEngine) -> None:
    weight_bytes = shared.info.weight_bytes
    progress: list[Progress | None] = []
    asked: list[tuple[str, int]] = []
    config = EngineConfig(str(MODEL_DIR), memory=1000)

    async def make_room(lacking: NoRoom) -> EngineConfig:
        asked.append((str(lacking), len(progress)))
        return replace(config, memory=(weight_bytes + 1000, None)[len(asked) - 1])

    engine = await ProcessEngine.start(
        config, "warning", on_progress=progress.append, make_room=make_room
    )
    try:
        (weights, before), (cache, still_before) = asked
        assert "the weights need" in weights
        assert "the budget holds a context of" in cache
        assert before == still_before == 0
        assert Progress("weights", 0, weight_bytes) in progress
    finally:
        await engine.close()


async def test_a_model_without_room_is_refused_before_its_weights_are_read() -> None:
    progress: list[Progress | None] = []
    with pytest.raises(NoRoom, match="the weights need"):
        await ProcessEngine.start(
            EngineConfig(str(MODEL_DIR), memory=1000), "warning", on_progress=progress.append
        )
    assert progress == [None]


async def test_an_engine_that_hangs_while_it_opens_is_ended() -> None:
    before = set(psutil.Process().children())
    with pytest.raises(ModelError, match="made no progress while it opened"):
        await ProcessEngine.start(
            EngineConfig("x"), worker="tests.serving.hanging_worker", timeout_s=0.25
        )
    assert set(psutil.Process().children()) <= before


class CountedFrames:
    """Frames of which each reading, which is a waking of the event loop, is counted."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self.reads = self.values = 0

    def read(self) -> list[Any] | None:
        self.reads += 1
        found = self._frames.read()
        self.values += len(found or ())
        return found


async def test_a_token_of_one_stream_is_one_frame_and_two_turns_of_the_event_loop(
    shared: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One turn reads the frame and wakes the stream, which runs in the next."""
    await shared.stats()
    frames = CountedFrames(shared._frames)
    monkeypatch.setattr(shared, "_frames", frames)
    loop: Any = asyncio.get_running_loop()
    turns, run_once = 0, loop._run_once

    def counted() -> None:
        nonlocal turns
        turns += 1
        run_once()

    monkeypatch.setattr(loop, "_run_once", counted)
    (ticket,) = shared.submit(
        [Request("r", PROMPT, GREEDY, max_tokens=60, stop_token_ids=frozenset())]
    )
    outputs = [output async for output in ticket]
    tokens = sum(len(output.token_ids) for output in outputs)
    assert tokens == 60
    assert frames.values <= tokens + 2  # that it was accepted, and how far its prompt was read
    assert frames.reads <= frames.values
    assert turns <= 2 * frames.reads + 2
