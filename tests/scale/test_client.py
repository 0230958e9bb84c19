"""The client of many engines, before replicas that do as they are told."""

from __future__ import annotations

import asyncio

import pytest

from quire.core.errors import EngineFailure
from quire.core.info import EngineStats, ModelInfo
from quire.core.request import Failure, FinishReason, Output, Request
from quire.scale.client import ReplicatedEngine
from quire.serving.ticket import Ticket
from tests.scale.scripted_replicas import HEALTHY, Died, Replicas, Script, after, dies, hangs, says

INFO = ModelInfo("", "gemma4", 256, 1000, dtype="float32", device="cpu", kv_memory=0)


def engine_of(*scripts: Script) -> tuple[ReplicatedEngine, Replicas]:
    replicas = Replicas(*scripts)
    return ReplicatedEngine(replicas, INFO), replicas


def requests(*names: str) -> list[Request]:
    return [Request(name, (1, 2)) for name in names]


async def outputs(ticket: Ticket) -> list[Output]:
    return [output async for output in ticket]


def token(name: str, number: int, finish: FinishReason | None = None) -> Output:
    return Output(name, (number,), finish=finish)


async def tokens(ticket: Ticket) -> list[int]:
    return [each for output in await outputs(ticket) for each in output.token_ids]


async def test_outputs_reach_the_tickets_of_their_requests() -> None:
    engine, _ = engine_of(
        says(
            "r1",
            [token("a", 1), token("b", 2)],
            [token("a", 3)],
            [token("b", 4, FinishReason.STOP), token("a", 5, FinishReason.LENGTH)],
        )
    )
    first, second = engine.submit(requests("a", "b"))
    assert await tokens(first) == [1, 3, 5]
    assert await tokens(second) == [2, 4]
    await engine.close()


async def test_a_request_without_a_token_goes_to_another_replica() -> None:
    engine, replicas = engine_of(
        dies("r1", [Output("a", read=0)]), says("r2", [token("a", 7, FinishReason.STOP)])
    )
    (ticket,) = engine.submit(requests("a"))
    assert await tokens(ticket) == [7]
    assert replicas.asked == [["a"], ["a"]]
    assert [each.lost for each in replicas.routes] == [frozenset(), {"r1"}]
    await engine.close()


async def test_an_answer_that_has_started_fails_once_and_its_neighbour_goes_on() -> None:
    engine, replicas = engine_of(
        dies("r1", [token("a", 1)]), says("r2", [token("b", 2, FinishReason.STOP)])
    )
    first, second = engine.submit(requests("a", "b"))
    *_, last = await outputs(first)
    assert last.error is not None
    assert (last.error.status, last.error.code) == (503, "engine_failure")
    assert await tokens(second) == [2]
    assert replicas.asked == [["a", "b"], ["b"]]
    await engine.close()


async def test_an_engine_that_broke_down_counts_as_a_dead_replica() -> None:
    broken = Failure("it broke", 503, "server_error", code="engine_failure")
    engine, _ = engine_of(
        says("r1", [Output("a", finish=FinishReason.ERROR, error=broken)]),
        says("r2", [token("a", 7, FinishReason.STOP)]),
    )
    (ticket,) = engine.submit(requests("a"))
    assert await tokens(ticket) == [7]
    await engine.close()


async def test_refusals_are_not_taken_up_again() -> None:
    refused = Failure("too long", 400, "invalid_request_error")
    engine, replicas = engine_of(
        says("r1", [Output("a", finish=FinishReason.ERROR, error=refused)])
    )
    (ticket,) = engine.submit(requests("a"))
    assert (await outputs(ticket))[-1].error == refused
    assert len(replicas.asked) == 1
    await engine.close()


async def test_a_request_under_which_every_replica_dies_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.scale.client._PAUSE_S", 0)
    engine, replicas = engine_of(*[dies("") for _ in range(4)])
    (ticket,) = engine.submit(requests("a"))
    (end,) = await outputs(ticket)
    assert end.error is not None
    assert Died.__name__ in end.error.message
    assert len(replicas.asked) == 4
    await engine.close()


async def test_the_replica_is_told_of_an_abort() -> None:
    engine, replicas = engine_of(hangs("r1"))
    (ticket,) = engine.submit(requests("a"))
    await asyncio.sleep(0.01)
    ticket.abort(FinishReason.STOP)
    await asyncio.sleep(0.01)
    assert replicas.aborted == [("r1", "a", FinishReason.STOP)]
    await engine.close()
    assert (await outputs(ticket))[-1].finish is FinishReason.ERROR


async def test_a_replica_that_takes_no_more_messages_is_left() -> None:
    engine, replicas = engine_of(hangs("r1"))
    replicas.knows = False
    (ticket,) = engine.submit(requests("a"))
    await asyncio.sleep(0.01)
    ticket.abort()
    assert [each.finish for each in await outputs(ticket)] == [FinishReason.ABORT]
    await asyncio.sleep(0.01)
    assert replicas.streams[0].cancelled
    await engine.close()


async def test_an_abort_ends_a_request_that_waits_for_a_replica() -> None:
    engine, replicas = engine_of(hangs())
    (ticket,) = engine.submit(requests("a"))
    await asyncio.sleep(0.01)
    ticket.abort()
    assert [each.finish for each in await outputs(ticket)] == [FinishReason.ABORT]
    await asyncio.sleep(0.01)
    assert replicas.aborted == []
    assert replicas.streams[0].cancelled
    await engine.close()


async def test_one_of_several_may_be_aborted_before_a_replica_has_them() -> None:
    taken = asyncio.Event()
    engine, replicas = engine_of(after(taken, says("r1", [token("b", 2, FinishReason.STOP)])))
    first, second = engine.submit(requests("a", "b"))
    await asyncio.sleep(0.01)
    first.abort()
    taken.set()
    assert await tokens(second) == [2]
    await asyncio.sleep(0.01)
    assert replicas.aborted == [("r1", "a", FinishReason.ABORT)]
    await engine.close()


async def test_a_closed_client_takes_nothing() -> None:
    engine, _ = engine_of()
    await engine.close()
    assert engine.failure == "the server is shutting down"
    with pytest.raises(EngineFailure):
        engine.submit(requests("a"))


async def test_statistics_are_sums_over_the_replicas_that_answer() -> None:
    engine = ReplicatedEngine(Replicas(stats=[HEALTHY, Died(), HEALTHY]), INFO)
    stats = await engine.stats()
    assert (stats.running, stats.waiting) == (2, 4)
    assert stats.kv_used == (("a", 6),)
    assert stats.finished == (("stop", 2),)
    assert stats.steps == EngineStats().steps
    await engine.close()
