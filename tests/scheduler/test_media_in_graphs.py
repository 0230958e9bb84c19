"""Chunks with media items that are not split, in steps that run as CUDA graphs."""

from __future__ import annotations

import pytest

from quire.core.media import MediaItem, PlacedMedia
from quire.core.request import Request
from quire.scheduler.plan import StepPlan, StepResult
from tests.scheduler.simulation import GROUPS, Simulation, Tables


def shown(name: str, before: int, rows: int) -> Request:
    """Return a prompt with a picture of so many rows, always the same one, and two tokens after
    it.
    """
    item = MediaItem("image", b"", (1, rows), rows, b"same")
    first = 100 * ord(name)
    prompt = tuple(range(first, first + before + rows + 2))
    return Request(name, prompt, max_tokens=1, media=(PlacedMedia(before, item),))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int]]]:
    """Return the sequences of each step, and how many rows each has."""
    found: list[list[tuple[str, int]]] = []
    execute = Simulation._execute

    def noted(self: Simulation, plan: StepPlan, before: Tables) -> StepResult:
        found.append([(rows.id, rows.count) for rows in plan.sequences])
        return execute(self, plan, before)

    monkeypatch.setattr(Simulation, "_execute", noted)
    return found


def test_a_step_takes_the_pictures_that_fit_its_graph(
    steps: list[list[tuple[str, int]]],
) -> None:
    simulation = Simulation(
        GROUPS["images"], 1 << 20, chunk=100, max_context=100, max_graph_rows=32
    )
    for name in "abcd":
        simulation.add(shown(name, 2, 10))
    simulation.run()
    read = [sum(count for _, count in step) for step in steps if step]
    assert max(read) <= 32
    assert len(read) == 2
    assert any(sum(count >= 10 for _, count in step) > 1 for step in steps)


def test_a_picture_larger_than_any_graph_is_read_alone(
    steps: list[list[tuple[str, int]]],
) -> None:
    simulation = Simulation(
        GROUPS["images"], 1 << 20, chunk=100, max_context=100, max_graph_rows=16
    )
    for name in "ab":
        simulation.add(shown(name, 2, 20))
    simulation.run()
    assert len(simulation.ended) == 2
    large = [step for step in steps if any(count >= 20 for _, count in step)]
    assert len(large) == 2
