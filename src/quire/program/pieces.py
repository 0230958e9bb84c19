"""Long work on the host that is cut in pieces, between which an engine takes steps."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def at_once(pieces: Generator[None, None, T]) -> T:
    """Do all pieces of some work, and return its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result
