"""Places of jobs: so many at once, by turns of keys, with long jobs paused for others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from quire.core.errors import EngineFailure, Overloaded
from quire.serving.places import _PAUSED, _QUEUED, SLICE_S, Places
from tests.support import virtual_time


@dataclass
class Work:
    """Jobs that take virtual time while they are not paused."""

    places: Places
    most: int = 0
    paused: int = 0
    ended: list[str] = field(default_factory=list)
    waited: dict[str, float] = field(default_factory=dict)

    async def run(self, key: str, seconds: float, name: str = "") -> None:
        clock = asyncio.get_running_loop().time
        asked = clock()
        place = await self.places.acquire(key)
        try:
            goes_on = asyncio.Event()
            goes_on.set()

            def pause() -> None:
                self.paused += 1
                goes_on.clear()

            self.places.attach(place, pause, goes_on.set)
            left = seconds
            while left > 1e-6:
                await goes_on.wait()
                self.most = max(self.most, self.places.running)
                await asyncio.sleep(0.01)
                left -= 0.01
            self.ended.append(name or key)
            self.waited[name or key] = clock() - asked - seconds
        finally:
            self.places.release(place)


def test_so_many_run_at_once_in_the_order_in_which_they_came() -> None:
    async def check() -> None:
        work = Work(Places(2))
        await asyncio.gather(*(work.run("", 1, str(number)) for number in range(6)))
        assert work.ended == list("012345")
        assert (work.most, work.paused) == (2, 0)
        assert work.places.running == work.places._paused == 0

    virtual_time.run(check())


def test_long_jobs_of_one_key_delay_another_by_a_slice() -> None:
    async def check() -> None:
        work = Work(Places(2))
        long = [asyncio.create_task(work.run("b", 60, f"b{number}")) for number in range(4)]
        await asyncio.sleep(5)
        for number in range(3):
            await work.run("a", 0.8, f"a{number}")
            assert work.waited[f"a{number}"] <= 3 * SLICE_S
        assert work.most == 2
        assert work.paused > 0
        await asyncio.gather(*long)
        assert work.waited["b3"] <= 60 + 3 * 0.8 + 3 * SLICE_S  # nothing was lost
        assert work.places._paused == 0

    virtual_time.run(check())


def test_keys_with_long_jobs_get_equal_shares() -> None:
    async def check() -> None:
        work = Work(Places(2))
        many = [work.run("b", 10, f"b{number}") for number in range(8)]
        few = [work.run("a", 10, f"a{number}") for number in range(2)]
        await asyncio.gather(*many, *few)
        assert max(work.waited["a0"], work.waited["a1"]) <= 10 + 4 * SLICE_S

    virtual_time.run(check())


def test_paused_jobs_are_bounded_and_a_paused_one_may_leave() -> None:
    async def check() -> None:
        work = Work(Places(1))
        tasks = []
        for number in range(_PAUSED + 3):
            tasks.append(asyncio.create_task(work.run(f"k{number}", 100)))
            await asyncio.sleep(1)
        await asyncio.sleep(10)
        assert work.places._paused == _PAUSED
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert work.places.running == work.places._paused == 0
        await work.run("z", 1)

    virtual_time.run(check())


def test_a_key_s_queue_is_bounded_and_another_key_has_its_own() -> None:
    async def check() -> None:
        work = Work(Places(1))
        tasks = [asyncio.create_task(work.run("b", 1)) for _ in range(_QUEUED + 1)]
        await asyncio.sleep(0.1)
        with pytest.raises(Overloaded, match="wait to be read"):
            await work.run("b", 1)
        await work.run("a", 0.1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await work.run("b", 0.1)  # nobody waits any more

    virtual_time.run(check())


def test_closing_fails_all_that_wait() -> None:
    async def check() -> None:
        work = Work(Places(1))
        tasks = [asyncio.create_task(work.run("b", 1)) for _ in range(3)]
        await asyncio.sleep(0.1)
        work.places.close("over")
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in outcomes] == [type(None), EngineFailure, EngineFailure]
        with pytest.raises(EngineFailure, match="over"):
            await work.run("a", 1)

    virtual_time.run(check())
