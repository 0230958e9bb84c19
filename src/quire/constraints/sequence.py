"""Watches a stream of tokens for a fixed sequence. Pure Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy

Spelling = Callable[[Sequence[int]], bytes]
"""A function that returns the bytes that tokens spell."""


class SequenceWatcher:
    """Reports after each token whether a sequence of tokens has come. An empty sequence never
    comes.

    Args:
        ids: the sequence.
        spelling: counts other tokens that spell the same, too: text beside a mark of ordinary
            tokens changes how the mark is cut into tokens. None where only `ids` count.

    Attributes:
        rest: bytes after the sequence in the token that completed it.
    """

    def __init__(self, ids: tuple[int, ...], spelling: Spelling | None = None) -> None:
        self._ids = deque(ids)
        self._last: deque[int] = deque(maxlen=len(ids))
        self._spelling = spelling
        self._text = spelling(ids) if spelling is not None else b""
        self._tail = b""
        self.rest = b""

    def copy(self) -> SequenceWatcher:
        """Return an independent copy of the state."""
        other = copy(self)
        other._last = self._last.copy()
        return other

    def push(self, token: int) -> bool:
        """Add a token; return whether it completes the sequence. Overlapping matches count."""
        self._last.append(token)
        if not self._text or self._spelling is None:
            return bool(self._ids) and self._last == self._ids
        seen = self._tail + self._spelling((token,))
        at = seen.find(self._text)
        self._tail = seen[max(0, len(seen) - len(self._text) + 1) :]
        self.rest = seen[at + len(self._text) :] if at >= 0 else b""
        return at >= 0

    def matched(self) -> int:
        """Return how many ids of the sequence, from its first, the tokens so far end with."""
        last, ids = list(self._last), list(self._ids)
        lengths = range(len(last), 0, -1)
        return next((n for n in lengths if last[len(last) - n :] == ids[:n]), 0)
