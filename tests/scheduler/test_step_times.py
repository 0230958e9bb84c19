"""The table of step times."""

from __future__ import annotations

import random
import sys
from itertools import pairwise

import pytest

from quire.scheduler.step_times import StepTimes


def measured(*steps: tuple[int, float]) -> StepTimes:
    times = StepTimes()
    for rows, seconds in steps:
        times.observe(rows, seconds)
    return times


def test_nothing_is_known_before_a_step_ran() -> None:
    times = StepTimes()
    assert (times.largest, times.seconds(8), times.rows_within(1.0)) == (0, None, 0)


@pytest.mark.parametrize("fixed_s", [0.0, 1e-3, 30e-3])
def test_times_lie_on_lines_between_the_sizes_that_ran(fixed_s: float) -> None:
    times = measured(*((n, fixed_s + n * 1e-4) for n in (8, 32, 64, 128, 256, 512)))
    for rows in (1, 8, 20, 100, 400, 512):
        assert times.seconds(rows) == pytest.approx(fixed_s + rows * 1e-4)
    assert times.rows_within(fixed_s + 0.03) == pytest.approx(300, abs=1)
    assert times.seconds(1024) == pytest.approx(2 * (fixed_s + 512e-4))
    assert times.rows_within(1e9) == 1024


def test_with_one_size_fewer_rows_take_as_long() -> None:
    times = measured((64, 0.05))
    assert times.seconds(1) == 0.05
    assert times.seconds(128) == 0.1


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_slow_steps_do_not_count_beside_a_usual_one(slow: int) -> None:
    times = measured((8, 0.03), (64, 0.04))
    for number in range(5):
        times.observe(100, 5.0 if number < slow else 0.05)
    assert times.seconds(100) == pytest.approx(0.05)
    assert times.seconds(64) == pytest.approx(0.04)


def test_ranges_of_few_rows_are_narrow() -> None:
    """Of two numbers of rows in one range, five steps of one replace what the other took."""
    for few, many in pairwise(range(1, 14)):
        times = measured((few, 0.01), *5 * [(many, 0.02)])
        seconds = times.seconds(few)
        assert seconds is not None
        same_range = few in (5, 7, 9, 10, 11)
        assert (seconds > 0.015) == same_range, f"{few} and {many} rows"


def test_fewer_rows_never_take_longer() -> None:
    times = measured((32, 5.0), (64, 0.04))
    assert times.seconds(32) == pytest.approx(0.04)


def test_a_curve_is_seldom_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs a small model's step a twentieth. Where nobody asks for it, it is not made."""
    made, line = 0, StepTimes._line

    def counted(times: StepTimes, count: int) -> list[float]:
        nonlocal made
        made += 1
        return line(times, count)

    monkeypatch.setattr(StepTimes, "_line", counted)
    times = measured((1, 0.01), (4, 0.02))
    for asks in (True, False):
        made = 0
        for number in range(100):
            times.observe(1, 0.01 + number * 1e-5)
            if asks or number == 50:
                times.curve(1, 4)
        assert made == (26 if asks else 1)
    assert times.curve(1, 1) == pytest.approx([times.seconds(1)])


def test_a_curve_is_as_slow_as_the_machine_is_now() -> None:
    """Steps of one row alone were seen since the machine became slower."""
    times = measured(*5 * [(1, 0.01), (4, 0.02)])
    assert times.curve(1, 4) == pytest.approx([0.01, 0.04 / 3, 0.05 / 3, 0.02])
    for _ in range(5):
        times.observe(1, 0.05)
    assert times.seconds(1) == pytest.approx(0.05)
    assert times.curve(1, 4) == pytest.approx(4 * [0.05])


def test_a_curve_follows_steps_that_contradict_older_ones_of_more_rows() -> None:
    """Made-up requests of a start may meet fewer experts than real ones: 9 rows took 3 ms."""
    times = measured(*5 * [(1, 2.0), (8, 3.0), (16, 3.0), (64, 3.2)])
    times.observe(9, 4.5)
    assert times.curve(1, 64) == measured(*5 * [(1, 2.0), (8, 3.0), (16, 3.0), (64, 3.2)]).curve(
        1, 64
    ), "a single step may be an outlier"
    for _ in range(2):
        times.observe(9, 4.5)
    curve = times.curve(0, 64)
    assert curve is not None
    assert [curve[rows] for rows in (1, 8, 9, 16, 64)] == pytest.approx([2.0, 3.0, 4.5, 4.5, 4.5])
    for _ in range(5):
        times.observe(8, 3.9)
        times.observe(64, 9.0)
    curve = times.curve(0, 64)
    assert curve is not None
    assert [curve[rows] for rows in (1, 8, 9, 64)] == pytest.approx([2.0, 3.9, 4.5, 9.0])


def test_a_single_step_that_was_much_too_short_is_left_out() -> None:
    """The first step of 1,024 rows seemed to take 1 ms on an H100."""
    usual = [(1, 1.8), (4, 2.7), (16, 4.8), (64, 8.5)]
    times = measured(*5 * usual, (256, 12.2), (1024, 1.04))
    curve = times.curve(0, 256)
    assert curve is not None
    for rows, seconds in (*usual, (256, 12.2)):
        assert curve[rows] == pytest.approx(seconds)


def test_a_curve_falls_with_steps_that_have_become_faster() -> None:
    times = measured(*5 * [(1, 0.02), (4, 0.03), (8, 0.04)])
    for _ in range(5):
        times.observe(4, 0.01)
    assert times.curve(1, 8) == pytest.approx(4 * [0.01] + [0.0175, 0.025, 0.0325, 0.04])


def test_a_machine_that_has_become_slower_is_believed_after_three_steps() -> None:
    times = measured((64, 0.04), (64, 0.04))
    for _ in range(2):
        times.observe(64, 0.4)
    assert times.seconds(64) == pytest.approx(0.04)
    times.observe(64, 0.4)
    assert times.seconds(64) == pytest.approx(0.4)


def test_a_question_after_a_step_computes_the_points_of_no_more_rows() -> None:
    times = measured(*((rows, rows * 1e-4) for rows in range(1, 2000, 7)))
    computed = 0

    def count(frame: object, event: str, function: object) -> None:
        nonlocal computed
        computed += event == "c_call" and function is min

    def points_after(rows: int) -> int:
        nonlocal computed
        times.seconds(rows)
        times.observe(rows, rows * 1e-4)
        computed = 0
        sys.setprofile(count)
        times.seconds(rows)
        sys.setprofile(None)
        return computed

    assert points_after(1) <= 2 < points_after(1800)


def test_a_table_that_is_asked_after_every_step_says_the_same() -> None:
    draw = random.Random(1)
    asked, silent = StepTimes(), StepTimes()
    for _ in range(500):
        rows, seconds = draw.randint(1, 300), draw.random()
        for times in (asked, silent):
            times.observe(rows, seconds)
        asked.seconds(draw.randint(1, 300))
    assert [asked.seconds(rows) for rows in range(400)] == [
        silent.seconds(rows) for rows in range(400)
    ]


def test_times_of_much_larger_steps_are_not_known() -> None:
    times = measured((64, 0.04))
    assert times.known_seconds(128) == pytest.approx(0.08)
    assert times.known_seconds(129) is None


@pytest.mark.parametrize("sizes", [(), (8,), (4, 32), (1, 2, 12, 64, 100)])
def test_a_curve_is_the_times_of_many_sizes(sizes: tuple[int, ...]) -> None:
    times = measured(*((n, 1e-3 + n * n * 1e-5) for n in sizes))
    curve = times.curve(1, 299)
    if curve is None:
        assert not sizes
    else:
        assert curve == pytest.approx([times.seconds(rows) for rows in range(1, 300)])


def test_a_curve_is_made_when_steps_are_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device waits when it is asked for."""
    times = measured((1, 1e-3), (64, 2e-3))
    for _ in range(2):  # used again and again
        times.curve(1, 100)
        times.observe(32, 1.9e-3)
    monkeypatch.setattr(StepTimes, "_line", lambda times, count: pytest.fail("it is made again"))
    assert times.curve(1, 100) == pytest.approx([times.seconds(rows) for rows in range(1, 101)])


def _seconds(rows: int, keys: int) -> float:
    return 5e-3 + 16e-6 * rows + 1e-9 * keys


def test_keys_take_a_time_of_their_own() -> None:
    """Chunks of two prompts, with a step that loads a kernel, and fewer rows at their end."""
    times = StepTimes()
    for first in (0, 100):
        for context in range(first, 20_000, 512):
            slow = 0.1 * (context == 1024)
            times.observe(1024, _seconds(1024, 1024 * context) + slow, 1024 * context)
        times.observe(300, _seconds(300, 300 * 20_000), 300 * 20_000)
    added_s = (times.seconds(1024, 10**6) or 0.0) - (times.seconds(1024) or 0.0)
    assert added_s == pytest.approx(1e-3, rel=0.01)
    for rows in (300, 1024):
        for keys in (0, 10**7):
            assert times.seconds(rows, keys) == pytest.approx(_seconds(rows, keys), rel=0.01)
    within = times.rows_within(_seconds(600, 600 * 10_000), context=10_000)
    assert within == pytest.approx(600, rel=0.02)


@pytest.mark.parametrize("keys", [None, 1024])
def test_nothing_is_learnt_of_keys_that_do_not_differ(keys: int | None) -> None:
    times = measured((1024, 0.02))
    for number in range(20):
        times.observe(1024, 0.02 + 0.001 * number, keys)
    assert times.seconds(1024, 10**6) == times.seconds(1024)


def test_keys_never_make_a_step_shorter() -> None:
    times = StepTimes()
    for context in range(0, 20_000, 500):
        times.observe(64, 0.05 - context * 1e-6, 64 * context)
    assert times.seconds(64, 10**6) == times.seconds(64)


def test_rows_that_are_worth_it_are_read_at_part_of_the_highest_rate() -> None:
    times = measured(*5 * [(1, 0.01), (8, 0.02), (64, 0.04), (256, 0.1), (2048, 0.9)])
    assert times.worthwhile_rows(4, 0.2, 0.5) == 64, "half of 256 rows' 2,560 a second"
    assert times.worthwhile_rows(100, 0.2, 0.5) == 100
    assert times.worthwhile_rows(4, 0.03, 0.5) == 8, "64 rows take longer"
    assert times.worthwhile_rows(4, 0.001, 0.5) == 4
    assert StepTimes().worthwhile_rows(4, 0.2, 0.5) == 4
    assert measured(*5 * [(8, 0.0)]).worthwhile_rows(4, 0.2, 0.5) == 8


def test_newer_steps_correct_the_points_of_other_sizes() -> None:
    times = measured(*2 * [(2, 5.0), (16, 9.0), (64, 9.5)])
    for _ in range(5):
        times.observe(8, 0.02)
    assert times.seconds(2) == pytest.approx(0.02)
    assert times.seconds(16) == pytest.approx(2 * 16 * 0.02 / 8)
    assert times.seconds(64) == pytest.approx(2 * 64 * 0.02 / 8)
    for _ in range(5):
        times.observe(8, 1.0)
    assert times.seconds(16) == pytest.approx(1.0), "more rows take no less time"
