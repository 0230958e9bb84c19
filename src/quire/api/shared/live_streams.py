"""Running streams, and a bounded history of finished ones, for the live view."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Iterable

_KEPT = 20
"""Number of finished streams that are remembered."""


class Stream:
    """One choice of one request, from its submission to its end.

    Attributes:
        model: served name of the model.
        prompt_tokens: number of tokens of its prompt.
        generated: tokens so far.
    """

    def __init__(self, prompt_tokens: int, model: str) -> None:
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.generated = 0
        self._started = time.perf_counter()
        self._first: float | None = None
        self._cached = self._read = 0
        self._reuse: str | None = None
        self._read_by: float | None = None
        self._ended: float | None = None
        self._finish: str | None = None

    def read(self, done: int, cached: int, reuse: str | None, left_s: float | None = None) -> int:
        """Record that `done` prompt tokens were read, `cached` of them from the prefix cache.

        Returns:
            How many were computed since the last call. Tokens computed again after a preemption are
                not counted.
        """
        self._read_by = None if left_s is None else time.perf_counter() + left_s
        before = self._read if self._reuse is not None else cached
        self._read, self._cached, self._reuse = max(before, done), cached, reuse
        return self._read - before

    def start(self) -> None:
        """Record the first token."""
        self._first = time.perf_counter()
        self.generated = 1

    def end(self, finish: str) -> bool:
        """Record the end. Return False, without changes, if it was recorded before."""
        if self._ended is not None:
            return False
        self._ended, self._finish = time.perf_counter(), finish
        self._read_by = None
        return True

    def view(self, now: float) -> dict[str, object]:
        """Return the stream for JSON. Durations are in seconds.

        A stream without `first_token_s` waits or reads its prompt, for an expected `left_s` more.
        `reuse` is None until known; `finish` and `ended_s` (seconds ago) are None until the end.
        """
        first = None if self._first is None else round(self._first - self._started, 4)
        ended = now if self._ended is None else self._ended
        return {
            "model": self.model,
            "age_s": round(ended - self._started, 4),
            "first_token_s": first,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self._cached,
            "read_tokens": self._read,
            "left_s": None if self._read_by is None else round(max(0.0, self._read_by - now), 1),
            "reuse": self._reuse,
            "generated_tokens": self.generated,
            "finish": self._finish,
            "ended_s": None if self._ended is None else round(now - self._ended, 1),
        }


class Streams:
    """Running streams, and the last finished ones, as one caller may see them.

    Numbers count this caller's streams only, so they reveal nothing of others' load. A stream whose
    run was garbage collected is removed.
    """

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._ended: deque[Stream] = deque(maxlen=_KEPT)
        self._numbers: weakref.WeakKeyDictionary[Stream, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count(1)

    def add(self, stream: Stream) -> None:
        """Add a stream that starts."""
        self._streams.add(stream)
        self._numbers[stream] = next(self._next)

    def end(self, stream: Stream) -> None:
        """Move a stream to the finished ones. No effect if it was moved before."""
        if stream in self._streams:
            self._streams.remove(stream)
            self._ended.append(stream)

    def view(self) -> list[dict[str, object]]:
        """Return the running streams for JSON, oldest first."""
        return self._shown(sorted(self._streams, key=self._numbers.__getitem__))

    def view_ended(self) -> list[dict[str, object]]:
        """Return the last finished streams for JSON, newest first."""
        return self._shown(reversed(self._ended))

    def _shown(self, streams: Iterable[Stream]) -> list[dict[str, object]]:
        now = time.perf_counter()
        return [{"id": self._numbers[each], **each.view(now)} for each in streams]
