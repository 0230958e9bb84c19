"""Prompts beside streams, on a device whose step times were measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import pytest

from quire.core.request import Request
from quire.scheduler.plan import StepPlan
from tests.scheduler.test_timed_streams import LLAMA
from tests.scheduler.timed_streams import TimedStreams

HOST_S = 0.001
KEY_S = 1.05e-9
"""Seconds that a key before a prompt's chunk adds for each row: Llama 8B in 4 bits on an H200."""


@dataclass(frozen=True)
class Read:
    """The time until all prompts are read.

    Attributes:
        steps: seconds of each step meanwhile.
        chunks: prompt rows of each step that reads.
        beside: prompt rows of those that also generate.
    """

    seconds: float
    steps: list[float]
    chunks: list[int]
    beside: list[int]


def read_beside(streams: int, prompts: int, length: int, key_s: float = 0.0) -> Read:
    """Read prompts that arrive together while streams generate; 32 tokens answer each."""
    step_s = {rows: ms / 1e3 for rows, ms in LLAMA.items()}
    device = TimedStreams(step_s, lambda *_: HOST_S, None, prompts_s=0.06, key_s=key_s)
    for number in range(streams):
        device.add(Request(f"{number}", (number,), max_tokens=4096))
    for _ in range(40):
        device.step()
    schedule, plans, began = device.scheduler.schedule, list[StepPlan](), device.time

    def noted() -> StepPlan | None:
        plan = schedule()
        plans.extend([] if plan is None else [plan])
        return plan

    device.scheduler.schedule = noted  # type: ignore[method-assign]
    for number in range(prompts):
        first = 100_000 * (1 + number)
        prompt = tuple(range(first, first + length))
        device.add(Request(f"{streams + number}", prompt, max_tokens=32))
    while any(
        not each.progress.generated
        for each in (*device.scheduler.waiting, *device.scheduler.running)
    ):
        device.step()
    return Read(
        device.time - began,
        list(map(device.seconds, plans)),
        [plan.prompt_rows for plan in plans if plan.prompt_rows],
        [plan.prompt_rows for plan in plans if plan.prompt_rows and plan.decode_rows],
    )


@pytest.mark.parametrize(("prompts", "length", "most_s"), [(1, 20_000, 0.8), (4, 4_000, 0.55)])
def test_prompts_beside_streams_are_read_in_large_steps(
    prompts: int, length: int, most_s: float
) -> None:
    """In chunks of 248 tokens they took 1.21 and 0.81 s, while streams were hardly faster."""
    read = read_beside(8, prompts, length)
    assert read.seconds < most_s
    assert statistics.median(read.chunks) > 1000
    alone_ms = LLAMA[8] * (1 + max(1, prompts - 1))
    assert statistics.fmean(read.steps) < 1.1 * alone_ms / 1e3
    assert max(read.steps) <= LLAMA[1024] / 1e3


def test_prompts_that_end_one_after_the_other_hardly_delay_the_others() -> None:
    """While those that ended generate, the others are read in steps that are worth it."""
    read = read_beside(0, 8, 20_000)
    whole_s = 8 * 20_000 / 2048 * LLAMA[2048] / 1e3
    assert read.seconds < 1.13 * whole_s


def test_steps_that_were_slow_for_their_keys_are_not_taken_to_read_slowly() -> None:
    """The ends of long prompts are read in large steps, each row of which sees many keys. Beside
    streams the beginnings of the next prompts were read by 436 rows: in 4.92 s.
    """
    read = read_beside(0, 8, 20_000, key_s=KEY_S)
    assert read.seconds < 4.85
    assert statistics.median(read.beside) > 1000


def test_streams_are_as_fast_beside_prompts_with_many_keys() -> None:
    """What keys take is charged, too: as if it were nothing, steps took 6.7 ms on average."""
    read = read_beside(8, 1, 20_000, key_s=KEY_S)
    assert statistics.fmean(read.steps) < 2.2 * LLAMA[8] / 1e3
