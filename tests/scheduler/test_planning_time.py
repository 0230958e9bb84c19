"""Planning calls few functions, even for prompts as long as agents send them."""

from __future__ import annotations

import pytest

from quire.cache.block_manager import BlockManager
from quire.cache.specs import FullKV, KVGroup, RecurrentState, WindowKV, group_layers
from quire.core.kv_format import KVFormat
from quire.core.request import Request
from quire.scheduler.admission import SchedulerConfig
from quire.scheduler.plan import SampledTokens, StepResult
from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.scheduler import Scheduler
from tests.support.work import counted

LENGTH = 60_000
PLAIN = KVFormat()
KINDS = {
    "full": group_layers((FullKV(8, 128),)),
    "window": group_layers((WindowKV(8, 128, 1024), FullKV(8, 128))),
    "recurrent": group_layers((RecurrentState((("s", (1,), ""),)), FullKV(8, 128))),
}


def make(groups: tuple[KVGroup, ...], blocks: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(64, 64, 1 << 17),
        groups,
        BlockManager(blocks, lambda key: 1),
        PrefillBudget(0.04, 2.0, 2048),
        lambda format, salt: salt.encode(),
    )


def plan(scheduler: Scheduler) -> int:
    """Plan one step; return the functions that were called for it."""
    step, calls = counted(scheduler.schedule)
    assert step is not None
    sampled = {rows.number: SampledTokens((7,)) for rows in step.sequences if rows.sampled}
    scheduler.update(step, StepResult(sampled))
    scheduler.take_outputs()
    return calls


def serve(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        plan(scheduler)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_of_60000_tokens_is_planned_by_few_calls_a_block(kind: str) -> None:
    scheduler = make(KINDS[kind], 4000)
    prompt = tuple(number * 7919 % 30_000 for number in range(LENGTH))
    scheduler.add(Request("cold", prompt, max_tokens=2), PLAIN)
    serve(scheduler)
    calls = []
    for number in range(5):
        scheduler.add(Request(f"warm{number}", prompt, max_tokens=1), PLAIN)
        calls.append(plan(scheduler))
        scheduler.abort(f"warm{number}")
        scheduler.take_outputs()
    assert scheduler.counters.cached_tokens == 5 * (LENGTH - 1)
    assert max(calls) < 25 * LENGTH / 64, calls


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_for_room_costs_running_streams_nothing(kind: str) -> None:
    scheduler = make(KINDS[kind], 1200)
    prompt = tuple(number * 7919 % 30_000 for number in range(LENGTH))
    scheduler.add(Request("runs", prompt, max_tokens=500), PLAIN)
    while not scheduler.running or scheduler.running[0].progress.generated == 0:
        plan(scheduler)
    scheduler.add(Request("waits", prompt[::-1], max_tokens=2), PLAIN)
    calls = sorted(plan(scheduler) for _ in range(100))
    assert [sequence.id for sequence in scheduler.waiting] == ["waits"]
    assert calls[50] < 500, calls


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_generates_is_planned_and_read_by_few_calls(kind: str) -> None:
    """Planning and reading of rows is most of a step's host time at 256 streams."""
    scheduler = make(KINDS[kind], 1200)
    for number in range(64):
        scheduler.add(Request(f"r{number}", (number, 1, 2), max_tokens=500), PLAIN)
    while sum(each.progress.generated > 1 for each in scheduler.running) < 64:
        plan(scheduler)

    def whole() -> None:
        step = scheduler.schedule()
        assert step is not None
        sampled = {rows.number: SampledTokens((7,)) for rows in step.sequences}
        scheduler.update(step, StepResult(sampled))

    calls = sorted(counted(whole)[1] for _ in range(9))
    assert calls[4] / 64 < 100, calls
