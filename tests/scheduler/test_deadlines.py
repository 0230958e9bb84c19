"""Deadlines: earliest first, each once, and no more room than those in flight need."""

from __future__ import annotations

from quire.scheduler.deadlines import Deadlines


def test_each_passes_once_and_earliest_first() -> None:
    deadlines = Deadlines()
    for number, time in ((1, 5.0), (2, 3.0), (3, 4.0), (4, 9.0)):
        deadlines.set(number, time)
    deadlines.drop(3)
    deadlines.drop(7)  # never had one
    assert deadlines.take_passed(2.9) == []
    assert deadlines.take_passed(5.0) == [2, 1]
    assert deadlines.take_passed(5.0) == []
    assert deadlines.take_passed(9.0) == [4]


def test_those_that_ended_in_time_leave_no_trace() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.set(number, 1e6 + number)
        deadlines.drop(number - 3)
    assert len(deadlines) <= 32
    assert deadlines.take_passed(1e9) == [9997, 9998, 9999]
