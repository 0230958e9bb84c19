"""A burst of requests is read one a turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from quire.api.shared.pacing import Pace

REQUESTS = 5


class Turns:
    """Counts turns of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._next()

    def _next(self) -> None:
        self.count += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


async def read(pace: Pace, name: int, done: Callable[[int], None]) -> None:
    await pace.turn()
    done(name)


async def burst(*, leaving: int | None = None) -> list[tuple[int, int]]:
    """Return each request that was read, with the turn in which it was."""
    pace, turns, found = Pace(), Turns(), list[tuple[int, int]]()
    tasks = [
        asyncio.create_task(read(pace, name, lambda name: found.append((name, turns.count))))
        for name in range(REQUESTS)
    ]
    await asyncio.sleep(0)
    if leaving is not None:
        tasks[leaving].cancel()
    await asyncio.wait(tasks)
    turns.stop()
    return found


def test_each_turn_reads_one_request_in_order() -> None:
    found = asyncio.run(burst())
    assert [name for name, _ in found] == list(range(REQUESTS))
    turns = [turn for _, turn in found]
    assert len(set(turns)) == REQUESTS
    assert turns[-1] - turns[0] <= REQUESTS


@pytest.mark.parametrize("leaving", range(1, REQUESTS))
def test_a_client_that_leaves_costs_no_turn(leaving: int) -> None:
    found = asyncio.run(burst(leaving=leaving))
    assert [name for name, _ in found] == [each for each in range(REQUESTS) if each != leaving]
    turns = [turn for _, turn in found]
    assert len(set(turns)) == REQUESTS - 1
    assert turns[-1] - turns[0] <= REQUESTS - 1


def test_a_lone_request_waits_for_nothing() -> None:
    async def lone() -> None:
        pace = Pace()
        for _ in range(2):
            with pytest.raises(StopIteration):
                pace.turn().send(None)
            await asyncio.sleep(0)

    asyncio.run(lone())
