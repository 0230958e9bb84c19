"""Prefix sharing: which prompt waits for which, what is reused, where recurrent states are kept."""

from __future__ import annotations

import pytest

from quire.cache.blocks import PoolKey
from quire.cache.index import Node
from quire.core.kv_format import KVFormat
from quire.core.request import Request
from tests.scheduler.simulation import (
    BLOCK,
    GROUPS,
    ONLY_RECURRENT,
    PLAIN,
    SEALED,
    Simulation,
    block_bytes,
)

PROMPT = tuple(range(1, 21))  # five blocks
PARTIAL = BLOCK // 2


def request(name: str, prompt: tuple[int, ...] = PROMPT, tokens: int = 2) -> Request:
    return Request(name, prompt, max_tokens=tokens)


def world(groups: str = "full", chunk: int = 7) -> Simulation:
    return Simulation(GROUPS[groups], budget=4000, chunk=chunk)


def running(simulation: Simulation) -> set[str]:
    return {sequence.id for sequence in simulation.scheduler.running}


def test_a_prompt_waits_for_the_neighbour_that_computes_its_start() -> None:
    simulation = world()
    simulation.add(request("first"))
    simulation.add(request("second", (*PROMPT, 77)))
    simulation.add(request("other", (90, *PROMPT)))
    simulation.step()
    assert running(simulation) >= {"first"}
    assert simulation.sequence("second").prefix.waits_on is not None
    assert simulation.sequence("other").prefix.waits_on is None
    simulation.run()
    assert simulation.ended["second"].cached_tokens == len(PROMPT)
    assert simulation.ended["other"].cached_tokens == 0
    simulation.check_nothing_leaks()


def test_who_waits_for_a_neighbour_that_leaves_goes_on_alone() -> None:
    simulation = world(chunk=5)
    simulation.add(request("first"))
    simulation.add(request("second", (*PROMPT, 77)))
    simulation.step()
    assert "second" not in running(simulation)
    simulation.scheduler.abort("first")
    simulation.run()
    assert len(simulation.answers["second"]) == 2
    assert simulation.ended["second"].cached_tokens < len(PROMPT)
    simulation.check_nothing_leaks()


def test_who_leaves_before_its_turn_was_told_of_no_reuse() -> None:
    simulation = world(chunk=5)
    simulation.add(request("first"))
    simulation.add(request("second", (*PROMPT, 77)))
    simulation.step()
    simulation.scheduler.abort("second")
    simulation.run()
    assert simulation.ended["second"].reuse is None
    assert simulation.ended["first"].reuse == "new"


@pytest.mark.parametrize(
    ("format", "cached"),
    [(PLAIN, len(PROMPT) + PARTIAL), (SEALED, len(PROMPT))],
    ids=["plain", "tail"],
)
def test_a_block_that_is_not_full_is_found_where_it_is_kept_as_written(
    format: KVFormat, cached: int
) -> None:
    prompt = (*PROMPT, *range(50, 50 + PARTIAL))
    simulation = world()
    simulation.add(request("first", prompt, tokens=1), format)
    simulation.run()
    simulation.add(request("second", (*prompt, 99)), format)
    simulation.run()
    assert simulation.ended["second"].cached_tokens == cached
    simulation.check_nothing_leaks()


@pytest.mark.parametrize(
    ("prompt", "cached", "reason"),
    [
        ((*PROMPT, 50, 99), 20, "still being written at token 20"),
        ((*PROMPT[:5], 99, 99), 5, "first difference at token 5"),
        ((*PROMPT, 98, 99), 20, "first difference at token 20"),
        ((98, 99), 0, "new"),
    ],
)
def test_what_a_neighbour_still_writes_is_no_difference(
    prompt: tuple[int, ...], cached: int, reason: str
) -> None:
    simulation = world()
    simulation.add(request("first", (*PROMPT, 50), tokens=9))
    for _ in range(4):
        simulation.step()
    assert running(simulation) == {"first"}
    simulation.add(request("second", prompt))
    simulation.run()
    assert (simulation.ended["second"].cached_tokens, simulation.ended["second"].reuse) == (
        cached,
        reason,
    )


@pytest.mark.parametrize("asked", [(*PROMPT, 50, 99), (*PROMPT, 60, 99)], ids=["older", "newer"])
def test_the_reason_does_not_depend_on_the_order_of_neighbours(asked: tuple[int, ...]) -> None:
    """One neighbour writes what the prompt needs, the other differs there."""
    simulation = world(chunk=40)
    for last in (50, 60):
        simulation.add(request(f"ends with {last}", (*PROMPT, last), tokens=20))
    while len(running(simulation)) < 2 or any(not said for said in simulation.answers.values()):
        simulation.step()
    simulation.add(request("asked", asked))
    simulation.run()
    assert simulation.ended["asked"].reuse == "still being written at token 20"


def test_formats_share_nothing() -> None:
    simulation = world()
    simulation.add(request("first"))
    simulation.run()
    simulation.add(request("second", (*PROMPT, 77)), SEALED)
    simulation.run()
    assert (simulation.ended["second"].cached_tokens, simulation.ended["second"].reuse) == (
        0,
        "new",
    )


@pytest.mark.parametrize(
    ("format", "places"),
    [(PLAIN, {8, 16, 19, 6}), (SEALED, {8, 16, 4})],
    ids=["plain", "tail"],
)
def test_where_recurrent_state_is_kept(format: KVFormat, places: set[int]) -> None:
    """Every 8 tokens, before the last one, and where a message ends; in whole blocks with tails."""
    simulation = world("recurrent")
    sharing = simulation.scheduler.sharing
    simulation.add(Request("a", PROMPT, max_tokens=1, snapshots=(6,)), format)
    sequence = simulation.sequence("a")
    found = set()
    while sequence.progress.computed < len(PROMPT):
        sequence.progress.computed += sharing.until_snapshot(sequence)
        found.add(sequence.progress.computed)
    assert found == places | {len(PROMPT)}


def test_a_branch_goes_on_from_the_last_state_before_it_parts() -> None:
    simulation = world("recurrent")
    simulation.add(request("first"))
    simulation.run()
    simulation.add(request("second", (*PROMPT[:11], 88, 89)))
    simulation.run()
    assert simulation.ended["second"].cached_tokens == 8
    simulation.check_nothing_leaks()


DOCUMENT = tuple(range(200, 215))


def ask(simulation: Simulation, last: int, format: KVFormat = PLAIN) -> tuple[int, str | None]:
    """Ask another question about a document: cached tokens, and why no more."""
    name = f"question {last}"
    simulation.add(request(name, (*DOCUMENT, *[last] * 6)), format)
    simulation.run()
    return simulation.ended[name].cached_tokens, simulation.ended[name].reuse


def test_the_second_prompt_leaves_a_snapshot_where_it_parts_from_the_first() -> None:
    simulation = world("recurrent")
    assert [ask(simulation, last) for last in (1, 2, 3, 4)] == [
        (0, "new"),
        (8, "snapshot missing"),
        (15, "first difference at token 15"),
        (15, "first difference at token 15"),
    ]
    simulation.check_nothing_leaks()


def test_the_snapshot_lies_at_the_end_of_a_block_in_formats_with_tails() -> None:
    simulation = world("recurrent")
    assert [ask(simulation, last, SEALED)[0] for last in (1, 2, 3)] == [0, 8, 12]
    simulation.check_nothing_leaks()


@pytest.mark.parametrize(("chunk", "steps_between"), [(5, 0), (2, 3)])
def test_a_prompt_that_others_wait_for_leaves_the_snapshot_for_them(
    chunk: int, steps_between: int
) -> None:
    """Also for one that arrives when only the last state that it needs is still to come."""
    simulation = world("recurrent", chunk=chunk)
    for last in (1, 2, 3):
        simulation.add(request(f"{last}", (*DOCUMENT, *[last] * 6)))
        for _ in range(steps_between):
            simulation.step()
    simulation.run()
    assert [simulation.ended[f"{last}"].cached_tokens for last in (1, 2, 3)] == [0, 15, 15]
    simulation.check_nothing_leaks()


def test_prompts_that_share_less_than_a_block_leave_no_snapshot() -> None:
    simulation = world("recurrent")
    for last in (1, 2, 3):
        simulation.add(request(f"{last}", (7, 8, *[last] * 6)))
        simulation.run()
        assert simulation.ended[f"{last}"].cached_tokens == 0
    assert simulation.ended["3"].reuse == "first difference at token 2"


def _nodes(simulation: Simulation) -> list[Node]:
    """Return every node of the index but the roots."""
    nodes: list[Node] = []
    pending = list(simulation.scheduler.sharing.index._roots.values())
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        if node.parent is not None:
            nodes.append(node)
    return nodes


@pytest.mark.parametrize("states", [2, 3, 20])
def test_the_index_of_a_recurrent_model_is_bounded_by_its_states(states: int) -> None:
    """Each leaf of the index has a state, whether or not a snapshot found room."""
    budget = states * block_bytes(PoolKey(0, PLAIN))
    simulation = Simulation(ONLY_RECURRENT, budget, chunk=20)
    counts = []
    for number in range(60):
        for name in ("a", "b"):
            prompt = (number + 1000, *range(100 * (name == "b"), 20 + 100 * (name == "b")))
            simulation.add(Request(f"{name}{number}", prompt, max_tokens=3, snapshots=(7,)))
        simulation.run()
        nodes = _nodes(simulation)
        assert all(node.children or node.snapshots for node in nodes)
        assert not any(node.cursors for node in nodes)
        counts.append(len(nodes))
    assert max(counts) <= states * 6  # nodes of a sequence of 24 tokens
    simulation.check_nothing_leaks()
    assert not simulation.scheduler.sharing.index._roots


def test_pruning_spares_what_a_running_sequence_goes_on_from() -> None:
    """The neighbour's states and their nodes go; the sequence registers its own as before."""
    simulation = Simulation(ONLY_RECURRENT, 3 * block_bytes(PoolKey(0, PLAIN)), chunk=40)
    shared = tuple(range(8))
    simulation.add(Request("short", (*shared, 1), max_tokens=1))
    simulation.run()
    simulation.add(Request("long", (*shared, 2, 3, 4), max_tokens=30))
    while len(simulation.answers["long"]) < 9:
        simulation.step()
    index, manager = simulation.scheduler.sharing.index, simulation.manager
    for node in _nodes(simulation):
        for state in list(node.snapshots.values()):
            if state.refs == 0:
                manager._evict(state)
    cursor = simulation.sequence("long").prefix
    assert cursor.node is not None
    assert cursor.node.parent is not None
    simulation.run()
    said = simulation.answers["long"]
    simulation.add(Request("again", (*shared, 2, 3, 4, *said, 5), max_tokens=1))
    simulation.run()
    assert simulation.ended["again"].cached_tokens == 11 + 30 - 1
    index.clear()
