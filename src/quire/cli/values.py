"""Values of options: what is no such value is told so, with an example."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from urllib.parse import urlsplit

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


def byte_count(text: str) -> int:
    """Parses `8GB`, `512MiB`, `1000`."""
    digits = text.rstrip("BbKkMmGgTtIi ")
    scale = _UNITS.get(text[len(digits) :].strip().upper())
    amount = _number(digits)
    if scale is None or amount is None or amount < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, e.g. 8GB or 512MiB")
    return int(amount * scale)


def at_least(least: int, what: str = "") -> Callable[[str], int]:
    """A parser of whole numbers from `least`; `what` says why not less."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            reason = f": {what}" if what else ""
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least}{reason}")
        return int(text)

    return parse


positive = at_least(1)


def port(text: str) -> int:
    """Parses a port."""
    number = at_least(0)(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, 0 to 65535")
    return number


def http_url(text: str) -> str:
    """Takes `http://host:port` or `https://...`."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is no URL, e.g. http://localhost:4318")
    return text


def duration(text: str) -> float:
    """Parses a time above 0, in whatever unit the option has."""
    amount = _number(text)
    if amount is None or amount <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time above 0")
    return amount


def number(text: str) -> float:
    """Parses a finite number."""
    amount = _number(text)
    if amount is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return amount


def _number(text: str) -> float | None:
    try:
        amount = float(text)
    except ValueError:
        return None
    return amount if math.isfinite(amount) else None
