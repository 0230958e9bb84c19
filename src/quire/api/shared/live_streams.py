"""The answers that are being generated now, one by one: what a gauge with labels cannot show."""

from __future__ import annotations

import itertools
import time
import weakref
from typing import Any

_numbers = itertools.count(1)


class Stream:
    """One choice of one request, from its submission to its end.

    Attributes:
        number: tells it from all others of this process.
        model: what clients call the model that answers.
        generated: tokens so far.
    """

    def __init__(self, prompt_tokens: int, model: str) -> None:
        self.model = model
        self.number = next(_numbers)
        self.generated = 0
        self._prompt_tokens = prompt_tokens
        self._started = time.perf_counter()
        self._first: float | None = None
        self._cached = 0
        self._reuse = ""

    def begin(self, cached: int, reuse: str) -> None:
        """The first token came; `cached` tokens of the prompt were known before."""
        self._first, self._cached, self._reuse = time.perf_counter(), cached, reuse
        self.generated = 1

    def view(self, now: float) -> dict[str, Any]:
        """For JSON; seconds are seconds. A stream without `first_token_s` waits or is read."""
        first = None if self._first is None else round(self._first - self._started, 4)
        return {
            "id": self.number,
            "model": self.model,
            "age_s": round(now - self._started, 4),
            "first_token_s": first,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached,
            "reuse": self._reuse,
            "generated_tokens": self.generated,
        }


class Streams:
    """Those of now. A stream whose run nobody keeps is gone, though nobody said so."""

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()

    def add(self, stream: Stream) -> None:
        """One begins."""
        self._streams.add(stream)

    def discard(self, stream: Stream) -> None:
        """One is over; harmless if it was before."""
        self._streams.discard(stream)

    def view(self) -> list[dict[str, Any]]:
        """For JSON, oldest first."""
        now = time.perf_counter()
        return [each.view(now) for each in sorted(self._streams, key=lambda each: each.number)]
