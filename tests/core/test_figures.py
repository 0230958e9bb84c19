"""Sizes and durations as people read them."""

from __future__ import annotations

import pytest

from quire.core.figures import brief, duration, size

SIZES = {
    0: "0 B",
    999: "999 B",
    999_700: "1.0 MB",
    131_072: "131 KB",
    99_970: "100 KB",
    5_725_000_000: "5.7 GB",
    2 * 10**16: "20000 TB",
}
DURATIONS = {
    0: "0 s",
    0.0001: "1 ms",
    0.5944: "594 ms",
    0.9996: "1.0 s",
    4: "4 s",
    59.96: "1 min",
    594.6: "9 min 55 s",
    7517: "2 h 5 min",
    3600: "1 h",
}


NUMBERS = {0.25: "0.25", 2147483647: "2147483647", 3.4e38: "3.4e38", 1e-7: "1e-07"}


@pytest.mark.parametrize(("number", "shown"), NUMBERS.items())
def test_numbers(number: float, shown: str) -> None:
    assert brief(number) == shown


@pytest.mark.parametrize(("count", "shown"), SIZES.items())
def test_sizes(count: float, shown: str) -> None:
    assert size(count) == shown


@pytest.mark.parametrize(("seconds", "shown"), DURATIONS.items())
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
