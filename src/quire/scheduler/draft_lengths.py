"""Decides how many drafts a step verifies. Uses no MLX."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.core.arrays import Floats, Integers

_MAX_DRAFTS = 16
"""Most drafts of one sequence in a step."""
_LEAST_CHANCE = 0.02
"""Drafts less likely than this to be accepted are not considered."""
_BEGINNING, _GOING_ON = 1.15, 1.0
"""Factors of tokens per second that drafts must promise: to begin with drafts, and to go on. The
device waits once more for a beginning, and step times and acceptance rates are inexact.
"""
_WAITS = 5
"""Number of recent waits that are kept."""
_MOST_WAIT = 2.0
"""Most steps without drafts that a wait counts as: some waits record a CUDA graph."""
_FORGOTTEN = 1 - 1 / 256
"""Decay factor of what steps with drafts measured, in steps without any."""
_PROMISES = 1 - 1 / 256
"""Decay factor of promised and accepted tokens for each token that is promised."""
_ASSUMED = 16.0
"""Promised tokens that count as accepted before any were compared."""
_IN_VAIN = 0.03
"""Most of the time of steps without drafts that asking drafters in vain may take."""
_MOST_PASSED = 64
"""Most steps that are planned without asking drafters."""


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

    def choose(
        self, candidates: Seq[Candidate], rows: int, *, beginning: bool = False
    ) -> list[int]:
        """Return the number of drafts for each candidate.

        Args:
            rows: rows of the step without drafts, one for each generating sequence.
            beginning: whether the step before, whose tokens are still to be read, has no drafts.
        """
        ...

    def settle(self, promised: float, accepted: int) -> None:
        """Record how many drafted tokens of a sequence a step accepted.

        Args:
            promised: expected number.
        """
        ...

    def steps_to_pass(self, asking_s: float, step_s: float) -> int:
        """Return how many steps to plan without asking drafters, after asking found no draft worth
        its rows.

        Args:
            asking_s: seconds that asking took.
            step_s: seconds from the plan of the step before to this one's.
        """
        ...


class EveryDraft:
    """Verifies every draft. For tests and measurements."""

    def steps_to_pass(self, asking_s: float, step_s: float) -> int:
        return 0

    def settle(self, promised: float, accepted: int) -> None:
        pass

    def choose(
        self, candidates: Seq[Candidate], rows: int, *, beginning: bool = False
    ) -> list[int]:
        return [each.most for each in candidates]


class _Waits:
    """How long the device waits for a step's plan, by the rows of the step without drafts.

    Numbers of rows from one power of two to the next share their waits. The second shortest of the
    last five counts, since some steps record a CUDA graph.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._expected: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> None:
        recent = self._recent.setdefault(rows.bit_length(), deque(maxlen=_WAITS))
        recent.append(seconds)
        self._expected[rows.bit_length()] = sorted(recent)[len(recent) // 4]

    def seconds(self, rows: int) -> float:
        """Return the expected wait; that of fewer rows, else of more, where none was measured."""
        size = rows.bit_length()
        nearest = min(self._expected, key=lambda each: (each > size, abs(each - size)), default=0)
        return self._expected.get(nearest, 0.0)

    def forget(self, rows: int) -> None:
        """Shorten the expected wait, so that drafts are tried again."""
        if rows.bit_length() in self._expected:
            self._expected[rows.bit_length()] *= _FORGOTTEN


class _Trust:
    """The ratio of accepted to promised drafted tokens of recent steps, at most 1.

    Acceptance rates are estimates. Drafts are chosen where these are high, so the chosen ones are
    too high on average.
    """

    def __init__(self) -> None:
        self._promised = self._accepted = 0.0

    @property
    def ratio(self) -> float:
        return min(1.0, (self._accepted + _ASSUMED) / (self._promised + _ASSUMED))

    def observe(self, promised: float, accepted: float) -> None:
        self._decay(_PROMISES**promised)
        self._promised += promised
        self._accepted += accepted

    def forget(self) -> None:
        """Move the ratio towards 1, so that drafts are tried again."""
        self._decay(_FORGOTTEN)

    def _decay(self, factor: float) -> None:
        self._promised *= factor
        self._accepted *= factor


class WorthwhileDrafts:
    """Verifies the drafts that raise the expected tokens per second of the whole step.

    A step with drafts costs more: it has more rows, its drafts may have to be computed, and the
    device waits while it is planned, because planning needs the previous step's tokens. The first
    step with drafts waits like the others, and so does the first step without, so beginning takes
    a larger gain than going on.

    Args:
        seconds: returns the durations of generating steps by their rows; None before one was
            measured.
    """

    def __init__(self, seconds: Callable[[Integers], Floats | None]) -> None:
        self._seconds = seconds
        self._waits = _Waits()
        self._trust = _Trust()

    def settle(self, promised: float, accepted: int) -> None:
        self._trust.observe(promised, accepted)

    def steps_to_pass(self, asking_s: float, step_s: float) -> int:
        if asking_s <= _IN_VAIN * step_s:
            return 0
        return int(min(_MOST_PASSED, asking_s / max(_IN_VAIN * step_s, 1e-9)))

    def observe_wait(self, seconds: float, rows: int) -> None:
        """Record how long the device waited for a step's plan.

        Args:
            rows: of the step without drafts.
        """
        alone = self._seconds(np.array([rows]))
        most = np.inf if alone is None else _MOST_WAIT * float(alone[0])
        self._waits.observe(rows, min(seconds, most))

    def choose(
        self, candidates: Seq[Candidate], rows: int, *, beginning: bool = False
    ) -> list[int]:
        none = [0] * len(candidates)
        rows = max(rows, 1)
        order, chances = _likeliest(candidates)
        seconds = self._seconds(np.arange(rows, rows + len(order) + 1))
        if seconds is None or not len(order):
            return none
        depth, number = np.divmod(order, len(candidates))
        token_s = np.array([each.token_s for each in candidates])[number]
        drafting_s = np.maximum.accumulate((depth + 1) * token_s)
        rates = (rows + self._trust.ratio * np.cumsum(chances)) / (
            seconds[1:] + self._waits.seconds(rows) + drafting_s
        )
        best = int(np.argmax(rates))
        if rates[best] <= (_BEGINNING if beginning else _GOING_ON) * rows / seconds[0]:
            if beginning:
                self._waits.forget(rows)
                self._trust.forget()
            return none
        lengths: list[int] = np.bincount(number[: best + 1], minlength=len(candidates)).tolist()
        return lengths


def _likeliest(candidates: Seq[Candidate]) -> tuple[Integers, Floats]:
    """Return the drafted tokens that are considered, the likeliest first, and their chances.

    The `n`-th token of candidate `c` has the number `(n - 1) * len(candidates) + c`.
    """
    most = np.array([min(each.most, _MAX_DRAFTS) for each in candidates])
    if not most.any():
        return np.zeros(0, np.int32), np.zeros(0)
    depths = np.arange(1, most.max() + 1)[:, None]
    chances = np.array([each.rate for each in candidates]) ** depths
    flat = np.where(depths <= most, chances, 0.0).ravel()
    order = np.argsort(-flat, kind="stable")  # a candidate's tokens stay in order
    order = order[: np.count_nonzero(flat >= _LEAST_CHANCE)]
    return order, flat[order]
