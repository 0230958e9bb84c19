"""Pages that come back from disk: the right ones, whatever is lost, late or never comes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.core.kv_format import KVFormat
from quire.core.request import FinishReason, Request
from tests.scheduler.simulation import GROUPS, PLAIN, SEALED, Simulation
from tests.support.scripted_disk import ScriptedDisk

PROMPT = tuple(range(10, 33))


def least_budget(kind: str, tokens: int = 40) -> int:
    scheduler = Simulation(GROUPS[kind], 1 << 20).scheduler
    return max(scheduler.limits.worst_case_bytes(format, tokens) for format in (PLAIN, SEALED))


def serve(simulation: Simulation, name: str, prompt: tuple[int, ...], format: KVFormat) -> int:
    """Serves a request by itself; how many of its tokens were reused."""
    simulation.add(Request(name, prompt, max_tokens=3), format)
    simulation.run()
    assert simulation.ended[name].finish is FinishReason.LENGTH
    return simulation.ended[name].cached_tokens


def serve_and_evict(simulation: Simulation, format: KVFormat) -> None:
    """`PROMPT`, and then so much else that nothing of it stays in memory."""
    serve(simulation, "first", PROMPT, format)
    for number in range(6):
        serve(simulation, f"other{number}", tuple(range(100 + number, 135 + number)), format)


@pytest.mark.parametrize("format", [PLAIN, SEALED], ids=["plain", "sealed"])
@pytest.mark.parametrize("kind", GROUPS)
def test_what_was_evicted_is_read_back(kind: str, format: KVFormat) -> None:
    disk = ScriptedDisk(0)
    simulation = Simulation(GROUPS[kind], least_budget(kind), max_context=40, disk=disk)
    serve_and_evict(simulation, format)
    assert serve(simulation, "again", PROMPT, format) == 20
    assert disk.hits > 0
    simulation.check_nothing_leaks()


@pytest.mark.parametrize("kind", GROUPS)
def test_a_new_process_finds_what_the_last_one_left(kind: str) -> None:
    disk = ScriptedDisk(0)
    before = Simulation(GROUPS[kind], 1 << 12, max_context=40, disk=disk)
    serve(before, "first", PROMPT, PLAIN)
    before.manager.spill_kept()
    before._execute_changes(before.manager.take_changes())
    after = Simulation(GROUPS[kind], 1 << 12, max_context=40, disk=disk)
    after.add(Request("same", PROMPT, max_tokens=3), PLAIN)
    after.add(Request("beside", PROMPT[:18], max_tokens=3), PLAIN)
    after.run()
    assert after.ended["same"].cached_tokens == 20
    after.check_nothing_leaks()


def test_a_disk_that_hangs_is_waited_for_only_so_long() -> None:
    disk = ScriptedDisk(0)
    simulation = Simulation(GROUPS["full"], least_budget("full"), max_context=40, disk=disk)
    serve_and_evict(simulation, PLAIN)
    disk._hangs = 1.0
    before = simulation.time
    assert serve(simulation, "again", PROMPT, PLAIN) < 20
    assert 1.9 < simulation.time - before < 4.0


def test_reading_that_takes_longer_than_computing_is_left() -> None:
    disk = ScriptedDisk(0)
    simulation = Simulation(GROUPS["full"], least_budget("full"), max_context=40, disk=disk)
    serve_and_evict(simulation, PLAIN)
    disk.seconds = lambda size: 100.0  # type: ignore[method-assign]
    assert serve(simulation, "again", PROMPT, PLAIN) < 20
    assert disk.hits == 0


prompts = st.tuples(
    st.integers(0, 2),  # which of a few common starts
    st.integers(0, 13),  # how much of it
    st.lists(st.integers(0, 3), max_size=14),  # what follows
)
arrivals = st.tuples(
    st.integers(0, 12),  # steps since the one before
    prompts,
    st.integers(1, 8),  # max_tokens
    st.sampled_from((PLAIN, PLAIN, SEALED)),
    st.one_of(st.none(), st.none(), st.integers(0, 9)),  # cancelled so many steps later
)


def beginning(which: int) -> tuple[int, ...]:
    return tuple(10 + which * 7 + i % 5 for i in range(13))


@pytest.mark.parametrize("kind", GROUPS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(arrivals, min_size=1, max_size=14),
    room=st.integers(0, 60),
    rows=st.integers(1, 4),
    seed=st.integers(0, 1000),
    loses=st.sampled_from((0.0, 0.0, 0.2)),
    hangs=st.sampled_from((0.0, 0.0, 0.3)),
)
def test_every_request_gets_its_own_past(
    kind: str,
    requests: list[tuple[int, tuple[int, int, list[int]], int, KVFormat, int | None],],
    room: int,
    rows: int,
    seed: int,
    loses: float,
    hangs: float,
) -> None:
    disk = ScriptedDisk(seed, loses=loses, hangs=hangs)
    budget = least_budget(kind) + room
    simulation = Simulation(GROUPS[kind], budget, rows, max_context=40, disk=disk)
    cancels: dict[int, list[str]] = {}
    now = 0
    for number, (wait, (which, shared, rest), max_tokens, format, cancel) in enumerate(requests):
        for _ in range(wait):
            for name in cancels.pop(now, []):
                simulation.scheduler.abort(name)
            simulation.step()
            now += 1
        prompt = (*beginning(which)[:shared], *rest) or (1,)
        request = Request(f"r{number}", prompt, max_tokens=max_tokens, snapshots=(shared,))
        simulation.add(request, format)
        if cancel is not None:
            cancels.setdefault(now + cancel, []).append(request.id)
    for name in [name for names in cancels.values() for name in names]:
        simulation.scheduler.abort(name)
    simulation.run(6000)
    assert len(simulation.ended) == len(requests)
    assert {end.finish for end in simulation.ended.values()} <= {
        FinishReason.LENGTH,
        FinishReason.ABORT,
    }
    simulation.check_nothing_leaks()
