"""The last requests that were refused."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_KEPT = 20


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused request: its path, model and error.

    Attributes:
        path: start of the path that the client sent.
        model: the model; None if it was refused before one was known.
        message: the error's message.
    """

    path: str
    model: str | None
    status: int
    message: str


class Refusals:
    """A bounded list of refused requests, kept apart from answers, so that a failing client hides
    none.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[Refusal, tuple[int, float]] = OrderedDict()

    def add(self, refusal: Refusal) -> None:
        """Count a refusal. Equal refusals share one entry."""
        count, _ = self._seen.pop(refusal, (0, 0.0))
        self._seen[refusal] = (count + 1, self._clock())
        if len(self._seen) > _KEPT:
            self._seen.popitem(last=False)

    def view(self) -> list[dict[str, object]]:
        """Return the refusals for JSON, newest first. `ended_s` is the age of the latest one."""
        now = self._clock()
        return [
            {
                "path": refusal.path,
                "model": refusal.model,
                "status": refusal.status,
                "message": refusal.message,
                "count": count,
                "ended_s": round(now - at, 1),
            }
            for refusal, (count, at) in reversed(self._seen.items())
        ]
