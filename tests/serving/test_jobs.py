"""Jobs: each in a process of its own, within limits, killed when nobody waits any more."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from quire.core.errors import EngineFailure, RequestError
from quire.serving.job_messages import JobLimits
from quire.serving.jobs import Jobs
from tests.serving import job_functions as functions
from tests.support.waiting import wait_until

LIMITS = JobLimits(at_once=2, cpu_s=1, wall_s=60, memory=256 << 20)


@pytest_asyncio.fixture
async def jobs() -> AsyncIterator[Jobs]:
    jobs = Jobs(functions.Opened, LIMITS)
    yield jobs
    await jobs.close()


async def gone(pid: int) -> None:
    """Wait until a process has ended."""
    await asyncio.to_thread(wait_until, lambda: not psutil.pid_exists(pid))


async def test_each_job_has_a_process_of_its_own(jobs: Jobs) -> None:
    first, second = await asyncio.gather(
        jobs.run(functions.join, "a", "b"), jobs.run(functions.join, "c")
    )
    assert (first[1], second[1]) == ("opened changed a b", "opened changed c")
    assert first[0] != second[0]
    await gone(first[0])


async def test_why_no_job_can_be_started_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    jobs = Jobs(functions.unopened, LIMITS)
    with pytest.raises(EngineFailure, match=r"folder has no tokenizer\.json"):
        await jobs.run(functions.join, "a")
    await jobs.close()
    assert "Traceback" not in capfd.readouterr().err


async def test_large_arguments_and_results_pass(jobs: Jobs) -> None:
    text = "x" * (8 << 20)
    assert len((await jobs.run(functions.join, text))[1]) > len(text)


async def test_a_refusal_comes_back_as_it_was_raised(jobs: Jobs) -> None:
    with pytest.raises(RequestError) as caught:
        await jobs.run(functions.refuse)
    error = caught.value
    assert (error.message, error.param, error.code) == ("'x' is no good.", "x", "bad")


async def test_an_unexpected_error_tells_no_details(jobs: Jobs) -> None:
    with pytest.raises(RuntimeError, match=r"^ValueError$"):
        await jobs.run(functions.break_down)


async def test_a_crash_costs_one_job(jobs: Jobs) -> None:
    other = asyncio.create_task(jobs.run(functions.join, "a"))
    with pytest.raises(RequestError) as caught:
        await jobs.run(functions.crash)
    assert caught.value.code == "request_too_costly"
    assert (await other)[1] == "opened changed a"


async def test_memory_is_limited(jobs: Jobs) -> None:
    assert await jobs.run(functions.fill, 1 << 20) == 1 << 20
    with pytest.raises(RequestError, match="256 MiB"):
        await jobs.run(functions.fill, 1 << 30)


async def test_processor_time_is_limited(jobs: Jobs, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="1 s"):
        await jobs.run(functions.spin, str(tmp_path / "pid"))


async def test_a_job_nobody_waits_for_is_killed(tmp_path: Path) -> None:
    jobs, started = Jobs(functions.Opened, JobLimits(at_once=1)), tmp_path / "pid"
    task = asyncio.create_task(jobs.run(functions.spin, str(started)))
    await asyncio.to_thread(wait_until, lambda: started.exists() and started.read_text())
    task.cancel()
    await gone(int(started.read_text()))
    assert (await jobs.run(functions.join))[1] == "opened changed"  # its place is free
    await jobs.close()


async def test_a_job_asks_the_server(jobs: Jobs) -> None:
    answers = {"double": lambda value: 2 * value}
    assert await jobs.run(functions.ask_twice, answers=answers) == [4, 42]


async def test_threads_of_a_job_each_get_their_own_answer(jobs: Jobs) -> None:
    answers = {"double": lambda value: 2 * value}
    doubled = await jobs.run(functions.ask_at_once, 500, answers=answers)
    assert doubled == [2 * number for number in range(500)]


async def test_the_first_process_is_started_anew_if_it_dies(jobs: Jobs) -> None:
    before = set(psutil.Process().children())
    await jobs.open()
    (first,) = set(psutil.Process().children()) - before
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert (await jobs.run(functions.join, "a"))[1] == "opened changed a"


def test_jobs_of_a_fork_hold_nothing_of_the_server(tmp_path: Path) -> None:
    """In a program of its own, since a fork needs a process of one thread."""
    command = [sys.executable, "-m", "tests.serving.forked_jobs", str(tmp_path / "file")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, input="unread")
    alone = {
        "files": [],
        "addresses": [],
        "input": "",
        "leads its group": True,
        "threads of libraries": "1",
    }
    assert json.loads(said.stdout) == [
        {"memory": ["made before"], **alone},
        {"memory": [], **alone},  # a program, since the fork was killed
    ]


async def test_a_place_is_kept_until_the_child_is_reaped(tmp_path: Path) -> None:
    jobs = Jobs(functions.Opened, JobLimits(at_once=2))
    await jobs.open()
    parent = max(psutil.Process().children(), key=lambda each: each.create_time())
    most = 0
    for round in range(30):
        tasks = [
            asyncio.create_task(jobs.run(functions.spin, str(tmp_path / f"{round}-{number}")))
            for number in range(8)
        ]
        await asyncio.sleep(0.01)
        most = max(most, len(parent.children()))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        most = max(most, len(parent.children()))
    assert 0 < most <= 2
    assert (await jobs.run(functions.join))[1] == "opened changed"
    await jobs.close()


async def test_orders_wait_for_a_first_process_that_does_not_read(jobs: Jobs) -> None:
    """More orders than its pipe holds: none is lost, and jobs that nobody wants never start."""
    await jobs.open()
    parent = jobs._parent
    assert parent is not None
    os.kill(parent._process.pid, signal.SIGSTOP)
    given = []
    for _ in range(2000):  # each is ended at once: 2,000 open sockets are over some limits
        given.append(parent.job())
        given[-1].end()
    never = sum(job.ended.done() for job in given)
    assert never > 0, "the pipe holds 2,000 orders"
    os.kill(parent._process.pid, signal.SIGCONT)
    await asyncio.gather(*(job.ended for job in given))
    assert not psutil.Process(parent._process.pid).children()
    assert (await jobs.run(functions.join))[1] == "opened changed"


async def test_a_key_that_fills_all_places_delays_another_by_little(tmp_path: Path) -> None:
    jobs = Jobs(functions.Opened, JobLimits(at_once=2))
    spinning = [
        asyncio.create_task(jobs.run(functions.spin, str(tmp_path / str(number)), key="b"))
        for number in range(4)
    ]
    started = [tmp_path / str(number) for number in range(2)]
    await asyncio.to_thread(wait_until, lambda: all(each.exists() for each in started))
    assert (await jobs.run(functions.join, key="a"))[1] == "opened changed"
    assert not any(task.done() for task in spinning)
    assert jobs.places.running + jobs.places._paused <= 3
    await jobs.close()
    for outcome in await asyncio.gather(*spinning, return_exceptions=True):
        assert isinstance(outcome, EngineFailure)  # and no refusal of the request


async def test_the_end_of_the_first_process_is_no_fault_of_the_request(tmp_path: Path) -> None:
    jobs, started = Jobs(functions.Opened, JobLimits(at_once=1)), tmp_path / "pid"
    task = asyncio.create_task(jobs.run(functions.spin, str(started)))
    await asyncio.to_thread(wait_until, lambda: started.exists() and started.read_text())
    assert jobs._parent is not None
    jobs._parent._process.kill()
    with pytest.raises(EngineFailure, match="has ended"):
        await task
    await gone(int(started.read_text()))
    assert (await jobs.run(functions.join))[1] == "opened changed"
    await jobs.close()


async def test_whoever_gives_up_does_not_stop_the_start_that_others_wait_for() -> None:
    jobs = Jobs(functions.Opened, JobLimits(at_once=2))
    leaving = asyncio.create_task(jobs.run(functions.join))
    staying = asyncio.create_task(jobs.run(functions.join))
    await asyncio.sleep(0.05)
    before = set(psutil.Process().children())
    leaving.cancel()
    assert (await staying)[1] == "opened changed"
    assert set(psutil.Process().children()) == before
    await jobs.close()


async def test_nothing_starts_after_the_end(jobs: Jobs) -> None:
    await jobs.close()
    with pytest.raises(EngineFailure):
        await jobs.run(functions.join)
