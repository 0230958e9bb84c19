"""Splits a step's budget of prompt tokens among the prompts being read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

_MIN_CHUNK = 16
"""Fewest tokens of a chunk, unless it ends its prompt."""

_MAX_OVERTAKING = 256
"""Most tokens that shorter prompts may take from the oldest prompt's halves."""


class PrefillSplit:
    """Splits each step's prompt tokens: half to the first prompt in turn, half to the shortest.

    A short prompt that arrives during a long one overtakes it, but only for a bounded time.
    """

    def __init__(self) -> None:
        self._owed = 0
        """Tokens that shorter prompts took from the oldest prompt's halves."""

    def split(
        self, budget: int, remaining: list[int], room: int, levels: Sequence[int] = ()
    ) -> list[int]:
        """Return each prompt's share of this step's tokens.

        Args:
            remaining: tokens that each prompt has left, in the order of their turns.
            room: the most rows that the step can take. A prompt with at most `_MIN_CHUNK` tokens
                left is read to its end even beyond the budget: a second chunk costs more than the
                tokens do.
            levels: priority level of each prompt. A prompt gets what those of lower levels leave.
                Empty if all are equal.
        """
        first = bisect_right(levels, levels[0]) if levels else len(remaining)
        shares = self._among_equals(budget, remaining[:first], room)
        while len(shares) < len(remaining):
            start = len(shares)
            end = bisect_right(levels, levels[start])
            shares += split(max(0, budget - sum(shares)), remaining[start:end])
        return shares

    def _among_equals(self, budget: int, remaining: list[int], room: int) -> list[int]:
        shortest = min(remaining, default=0)
        if budget and shortest <= _MIN_CHUNK:
            budget = max(budget, min(shortest, room))
        if len(remaining) < 2:
            self._owed = 0
        short_first = self._owed < _MAX_OVERTAKING and shortest <= _MAX_OVERTAKING
        shares = split(budget, remaining, short_first=short_first)
        if len(remaining) > 1:
            self._owed = max(0, self._owed + min(remaining[0], budget // 2) - shares[0])
        return shares


def whole_shares(budget: int, remaining: list[int]) -> list[int]:
    """Return the shares of prompts that are read whole or not at all: as many as fit in order, and
    the first even beyond the budget.
    """
    shares: list[int] = []
    for tokens in remaining:
        fits = not any(shares) or sum(shares) + tokens <= budget
        shares.append(tokens if fits else 0)
    return shares


def split(budget: int, remaining: list[int], *, short_first: bool = False) -> list[int]:
    """Split a budget among prompts, oldest first: half by age, or none, the rest by shortness.

    Each chunk has a fixed cost, so shares below `_MIN_CHUNK` go to the oldest prompt instead. If
    the whole budget is smaller, one prompt gets it.
    """
    shares = [0] * len(remaining)
    left = budget
    if len(remaining) > 1 and not (short_first and min(remaining) < remaining[0]):
        shares[0] = min(remaining[0], budget - budget // 2)
        left -= shares[0]
    for number in sorted(range(1, len(remaining)), key=lambda n: (remaining[n], n)):
        untouched = left == budget
        if left >= min(remaining[number], _MIN_CHUNK) or (
            untouched and remaining[number] < remaining[0]
        ):
            shares[number] = min(remaining[number], left)
            left -= shares[number]
    if remaining:
        shares[0] = min(remaining[0], shares[0] + left)
    return shares
