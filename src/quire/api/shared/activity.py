"""Token counts of each of the last seconds, for views that are opened later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

SECONDS = 120


@dataclass(slots=True)
class _Second:
    number: int
    read: int = 0
    written: int = 0


class Activity:
    """Counts tokens by the second. Idle time costs nothing.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[_Second] = deque(maxlen=SECONDS + 1)  # one is not over yet

    def add(self, *, read: int = 0, written: int = 0) -> None:
        """Count prompt tokens computed now, and generated tokens."""
        number = int(self._clock())
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        self._seconds[-1].read += read
        self._seconds[-1].written += written

    def view(self) -> dict[str, object]:
        """Return the last `SECONDS` whole seconds for JSON, oldest first."""
        first = int(self._clock()) - SECONDS
        read, written = [0] * SECONDS, [0] * SECONDS
        for each in self._seconds:
            if 0 <= (at := each.number - first) < SECONDS:
                read[at], written[at] = each.read, each.written
        return {"read_tokens": read, "written_tokens": written}
