"""Decides how many drafts a step verifies. Pure Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

_MAX_DRAFTS = 16
"""Most drafts of one sequence in a step."""
_LEAST_CHANCE = 0.02
"""Drafts less likely than this to be accepted are not considered."""
_MARGIN = 1.15
"""Factor of tokens per second that drafts must promise, because step times are inexact."""


_WAITS = 5
"""Number of recent waits. The shortest counts, since a step that records a CUDA graph takes long.
"""
_FORGOTTEN = 1 - 1 / 128
"""Decay factor of the wait in steps without drafts, which measure none."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that could be drafted.

    Attributes:
        rate: probability that a drafted token is accepted if those before it are.
        most: number of drafted tokens available.
        token_s: seconds of drafting one more token, for all candidates of a drafter at once; 0 if
            the tokens are there already.
    """

    rate: float
    most: int
    token_s: float = 0.0


class DraftLengths(Protocol):
    """Chooses how many drafts each sequence gets in a step."""

    def choose(self, candidates: Seq[Candidate], rows: int) -> list[int]:
        """Return the number of drafts for each candidate.

        Args:
            rows: rows of the step without drafts, one for each generating sequence.
        """
        ...


class EveryDraft:
    """Verifies every draft. For tests and measurements."""

    def choose(self, candidates: Seq[Candidate], rows: int) -> list[int]:
        return [each.most for each in candidates]


class WorthwhileDrafts:
    """Verifies the drafts that raise the expected tokens per second of the whole step.

    A step with drafts costs more: it has more rows, its drafts may have to be computed, and the
    device waits while it is planned, because planning needs the previous step's tokens.

    Args:
        seconds: returns the duration of a generating step by its rows; None before one was
            measured.
    """

    def __init__(self, seconds: Callable[[int], float | None]) -> None:
        self._seconds = seconds
        self._waits: deque[float] = deque(maxlen=_WAITS)
        self._wait_s = 0.0

    def observe_wait(self, seconds: float) -> None:
        """Record how long the device waited for a step's plan."""
        self._waits.append(seconds)
        self._wait_s = min(self._waits)

    def choose(self, candidates: Seq[Candidate], rows: int) -> list[int]:
        lengths = [0] * len(candidates)
        rows = max(rows, 1)
        alone_s = self._seconds(rows)
        if not alone_s:
            return lengths
        heap = [(-each.rate, number) for number, each in enumerate(candidates) if each.most > 0]
        heapify(heap)
        best_rate, expected, total = _MARGIN * rows / alone_s, float(rows), rows
        taken, draft_s = list(lengths), 0.0
        while heap:
            chance, number = heappop(heap)
            if -chance < _LEAST_CHANCE:
                break
            taken[number] += 1
            expected -= chance
            total += 1
            draft_s = max(draft_s, taken[number] * candidates[number].token_s)
            rate = expected / ((self._seconds(total) or alone_s) + self._wait_s + draft_s)
            if rate > best_rate:
                best_rate, lengths = rate, list(taken)
            if taken[number] < min(candidates[number].most, _MAX_DRAFTS):
                heappush(heap, (chance * candidates[number].rate, number))
        if not any(lengths):
            self._wait_s *= _FORGOTTEN
        return lengths
