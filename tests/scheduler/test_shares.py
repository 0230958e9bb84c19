"""API keys share the places and rows of steps; priorities come first. Rows are counted."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.core.request import Request
from quire.scheduler.plan import StepPlan
from tests.scheduler.simulation import GROUPS, Simulation


class Watched(Simulation):
    """A simulation that counts the rows of each key's sequences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rows: Counter[str] = Counter()
        schedule = self.scheduler.schedule

        def counted() -> StepPlan | None:
            plan = schedule()
            for rows in plan.sequences if plan else ():
                self.rows[rows.id[0]] += rows.count
            return plan

        self.scheduler.schedule = counted  # type: ignore[method-assign]

    def ask(
        self, name: str, prompt: int = 3, tokens: int = 20, share: float = 1, priority: int = 0
    ) -> None:
        """Adds a request of the key that its name starts with."""
        start = ord(name[0]) * 10_000 + int(name[1:]) * 100
        self.add(
            Request(
                name,
                tuple(range(start, start + prompt)),
                max_tokens=tokens,
                caller=name[0],
                share=share,
                priority=priority,
            )
        )

    def steps(self, count: int) -> Counter[str]:
        """Run so many steps; return the rows that each key got in them."""
        self.rows.clear()
        for _ in range(count):
            self.step()
        return Counter(self.rows)

    @property
    def runs(self) -> Counter[str]:
        """Number of running sequences of each key."""
        return Counter(each.id[0] for each in self.scheduler.running)


def simulation(budget: int = 4000, places: int = 4, chunk: int = 8) -> Watched:
    return Watched(GROUPS["full"], budget, places, chunk)


def test_a_key_that_comes_late_gets_half_of_the_places() -> None:
    s = simulation()
    for number in range(10):
        s.ask(f"a{number}", tokens=50)
    s.steps(4)
    assert s.runs == {"a": 4}
    for number in range(4):
        s.ask(f"b{number}", tokens=50)
    s.steps(10)
    assert s.runs == {"a": 2, "b": 2}
    rows = s.steps(20)
    assert rows["a"] == rows["b"] == 40
    s.run()
    s.check_nothing_leaks()


def test_places_do_not_change_back_and_forth() -> None:
    s = simulation(places=3)
    for number in range(3):
        s.ask(f"a{number}", tokens=30)
        s.ask(f"b{number}", tokens=30)
    s.steps(20)
    assert s.scheduler.counters.preemptions <= 1
    s.run()


def test_shares_of_places_follow_the_shares_of_keys() -> None:
    s = simulation()
    for number in range(8):
        s.ask(f"a{number}", tokens=50)
    for number in range(8):
        s.ask(f"b{number}", tokens=50, share=3)
    s.steps(12)
    assert s.runs == {"a": 1, "b": 3}
    s.run()


def test_rows_of_prompts_are_shared() -> None:
    """Two long prompts of one key do not keep another key's waiting."""
    s = simulation()
    for name in ("a0", "a1", "a2"):
        s.ask(name, prompt=50, tokens=1)
    s.steps(1)
    s.ask("b0", prompt=48, tokens=1)
    rows = s.steps(8)
    assert rows["b"] >= 20
    assert sum(rows.values()) == 64
    s.run()


def test_a_lower_priority_gives_up_its_place() -> None:
    s = simulation(places=2)
    for number in range(3):
        s.ask(f"b{number}", tokens=30, priority=1)
    s.steps(4)
    assert s.runs == {"b": 2}
    s.ask("a0", tokens=30)
    s.ask("a1", tokens=30)
    s.steps(4)
    assert s.runs == {"a": 2}
    s.run()
    ends = list(s.ended)
    assert set(ends[:2]) == {"a0", "a1"}
    s.check_nothing_leaks()


def test_a_lower_priority_reads_what_the_others_leave() -> None:
    s = simulation()
    s.ask("b0", prompt=50, tokens=1, priority=2)
    s.steps(1)
    s.ask("a0", prompt=24, tokens=1)
    assert s.steps(3) == {"a": 24}
    assert s.steps(2)["b"] == 16
    s.run()


def test_a_lower_priority_gives_up_its_blocks() -> None:
    s = simulation(budget=20 * 3)
    s.ask("b0", prompt=30, tokens=25, priority=1)
    s.steps(8)
    s.ask("a0", prompt=30, tokens=10)
    s.run()
    assert list(s.ended) == ["a0", "b0"]
    assert s.scheduler.counters.preemptions


def test_a_negative_priority_passes_its_own_key_alone() -> None:
    s = simulation(places=1)
    for name in ("a0", "a1"):
        s.ask(name, tokens=10)
    s.steps(2)
    s.ask("a2", tokens=10, priority=-5)
    s.run()
    assert list(s.ended) == ["a2", "a0", "a1"]

    s = simulation(places=1)
    s.ask("b0", tokens=10)
    s.steps(2)
    s.ask("a0", tokens=10, priority=-5)
    s.run()
    assert list(s.ended) == ["b0", "a0"]


def test_a_shared_start_is_not_waited_for_below_ones_own_priority() -> None:
    s = simulation()
    prompt = tuple(range(40))
    s.add(Request("b0", prompt, max_tokens=1, caller="b", priority=1))
    s.steps(1)
    s.add(Request("a0", (*prompt, 1), max_tokens=1, caller="a"))
    s.steps(1)
    assert s.runs == {"a": 1, "b": 1}
    s.run()


@pytest.mark.parametrize("places", [1, 2])
def test_first_come_is_first_served_within_a_key(places: int) -> None:
    s = simulation(places=places)
    for number in range(5):
        s.ask(f"a{number}", tokens=5)
    s.run()
    assert list(s.ended) == [f"a{number}" for number in range(5)]
    assert not s.scheduler.counters.preemptions
