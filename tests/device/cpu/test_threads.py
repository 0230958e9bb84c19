"""Threads share a kernel's work, and cost nothing while there is none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.waiting import wait_until

LARGE = 512, 1024


@pytest.fixture
def four_threads(compiled: Any) -> Iterator[Any]:
    compiled.set_threads(4)
    yield compiled
    compiled.set_threads(1)


def products(ops: Any, count: int) -> None:
    """Run so many products, one after the other."""
    rng = np.random.default_rng(0)
    weight = mx.array(rng.standard_normal(LARGE).astype(np.float32))
    x = mx.array(rng.standard_normal((4, LARGE[1])).astype(np.float32))
    mx.eval(weight, x)
    for _ in range(count):
        mx.eval(ops.product(x, weight))


def helpers() -> dict[str, str]:
    """Return the state of each thread of this process: "S" sleeps."""
    states = {}
    for folder in Path("/proc/self/task").iterdir():
        states[folder.name] = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
    return states


def test_threads_that_wait_for_work_sleep(compiled: Any) -> None:
    before = set(helpers())
    compiled.set_threads(4)
    try:
        products(compiled, 3)
        ours = set(helpers()) - before
        assert len(ours) == 3

        def asleep() -> bool:
            states = helpers()
            return all(states[thread] == "S" for thread in ours)

        wait_until(asleep)
        started = [_ticks(thread) for thread in ours]
        time.sleep(0.2)
        assert [_ticks(thread) for thread in ours] == started, "an idle thread took processor time"
    finally:
        compiled.set_threads(1)


def _ticks(thread: str) -> str:
    """Return nanoseconds that a thread has run."""
    return Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]


def test_one_thread_wakes_nobody(compiled: Any) -> None:
    before = compiled.wakings()
    products(compiled, 5)
    assert compiled.wakings() == before


@pytest.mark.parametrize("side", [64, 512])
def test_work_that_is_too_small_wakes_nobody(four_threads: Any, side: int) -> None:
    """Waking takes longer than a product of a few hundred thousand multiplications."""
    before = four_threads.wakings()
    x, weight = mx.ones((1, side)), mx.ones((side, side))
    assert mx.array_equal(four_threads.product(x, weight), mx.full((1, side), side))
    assert four_threads.wakings() == before


def test_large_work_wakes_threads_that_sleep(four_threads: Any) -> None:
    before = four_threads.wakings()
    wait_until(lambda: list(helpers().values()).count("S") >= 3)
    products(four_threads, 1)
    assert four_threads.wakings() > before


def test_no_more_threads_are_woken_than_there_are(four_threads: Any) -> None:
    products(four_threads, 1)
    before = four_threads.wakings()
    products(four_threads, 20)
    assert four_threads.wakings() - before <= 20 * 3 * 2  # rows are arranged, then multiplied


def test_threads_can_become_fewer(four_threads: Any) -> None:
    assert four_threads.threads() == 4
    four_threads.set_threads(2)
    assert four_threads.threads() == 2
    products(four_threads, 1)
