"""Sizes, durations and numbers as people read them. The page spells them alike (`figures.js`)."""

from __future__ import annotations

_UNITS = ("B", "KB", "MB", "GB", "TB")


def size(count: float) -> str:
    """Return bytes in a suitable decimal unit: `131 KB`, `5.7 GB`."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1
    return f"{value:.{digits}f} {_UNITS[unit]}"


def brief(number: float) -> str:
    """Return a number of up to ten digits, with an exponent where it needs more: `3.4e38`."""
    return f"{number:.10g}".replace("e+", "e")


def context(most: int, trained: int | None) -> str:
    """Return a context in tokens, with the length of training if it is shorter."""
    shorter = trained is not None and trained < most
    return f"{most:,} (trained on {trained:,})" if shorter else f"{most:,}"


def duration(seconds: float) -> str:
    """Return a duration such as `21 ms`, `4.2 s`, `9 min 55 s` or `2 h 5 min`; whole seconds have
    no decimal.
    """
    if 0 < seconds < 0.9995:
        return f"{max(1, round(seconds * 1000))} ms"
    if seconds < 59.95:
        return f"{seconds:.0f} s" if float(seconds).is_integer() else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
