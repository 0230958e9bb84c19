"""Watches a stream of tokens for a fixed sequence. Pure Python."""

from __future__ import annotations

from collections import deque


class SequenceWatcher:
    """Says after each token whether the last tokens spell `ids`. An empty sequence never shows."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self._ids = deque(ids)
        self._last: deque[int] = deque(maxlen=len(ids))

    def push(self, token: int) -> bool:
        """Adds a token; whether the sequence is complete with it. Overlapping matches count."""
        self._last.append(token)
        return bool(self._ids) and self._last == self._ids

    def matched(self) -> int:
        """How many ids of the sequence, from its first, the tokens so far end with."""
        last, ids = list(self._last), list(self._ids)
        lengths = range(len(last), 0, -1)
        return next((n for n in lengths if last[len(last) - n :] == ids[:n]), 0)
