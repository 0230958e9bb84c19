"""Estimates from given times."""

from __future__ import annotations

import pytest

from quire.serving.reading_time import ReadingTime


def seconds(done: int, token_s: float, place_s: float) -> float:
    """Return the estimated seconds until so many tokens are read."""
    return done * token_s + place_s * done**2 / 2


def read(reading: ReadingTime, first: int, end: int, token_s: float, place_s: float) -> None:
    """Read a prompt in chunks of two sizes, as beside other prompts."""
    done = first
    while True:
        reading.observe(done, 100 + seconds(done, token_s, place_s))
        if done >= end:
            return
        done = min(end, done + (300 if done % 2 else 211))


@pytest.mark.parametrize("first", [4, 5000])  # of which the cache had some
@pytest.mark.parametrize(("token_s", "place_s"), [(2e-4, 6e-8), (1e-3, 0.0), (0.0, 1e-7)])
def test_the_rest_of_a_long_prompt(first: int, token_s: float, place_s: float) -> None:
    for done in (9000, 12_000, 18_000):
        reading = ReadingTime()
        read(reading, first, done, token_s, place_s)
        left = seconds(20_000, token_s, place_s) - seconds(done, token_s, place_s)
        assert reading.left_s(20_000) == pytest.approx(left, rel=1e-3)
    assert reading.left_s(18_000) == 0


def test_reading_that_speeds_up_counts_by_its_mean() -> None:
    reading = ReadingTime()
    for chunk in range(30):
        reading.observe(100 * chunk, chunk - 0.01 * chunk**2)
    left = reading.left_s(6000)
    assert left is not None
    assert 6 < left < 30


def test_who_comes_later_counts() -> None:
    """A neighbour takes half of the time from the middle of the prompt on."""
    reading = ReadingTime()
    read(reading, 0, 10_000, 1e-3, 0.0)
    for done in range(10_200, 15_001, 200):
        reading.observe(done, 110 + (done - 10_000) * 2e-3)
    left = reading.left_s(20_000)
    assert left is not None
    assert 8 < left < 15


def test_nothing_is_said_before_it_is_known() -> None:
    reading = ReadingTime()
    assert reading.left_s(1000) is None
    for chunk in range(6):
        reading.observe(100 * chunk, float(chunk))
        assert reading.left_s(1000) is None
    reading.observe(600, 6.0)
    assert reading.left_s(1000) == pytest.approx(4)
    quick = ReadingTime()
    read(quick, 0, 5000, 1e-4, 0.0)
    assert quick.left_s(6000) is None


def test_what_was_lost_is_read_again() -> None:
    reading = ReadingTime()
    read(reading, 0, 4000, 1e-3, 0.0)
    reading.observe(0, 110.0)
    reading.observe(200, 110.2)
    assert reading.left_s(4200) == pytest.approx(4, rel=0.01)
