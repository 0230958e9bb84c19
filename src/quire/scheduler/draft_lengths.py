"""Decides how many drafts a step verifies. Uses no MLX."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.scheduler.step_times import ShortTimes

MAX_DRAFTS = 16
"""Most drafts of one sequence in a step."""
_LEAST_CHANCE = 0.02
"""Drafts less likely than this to be accepted are not considered."""
_MOST_CONSIDERED = 128
"""Most drafts of all sequences that are considered, beyond one for each."""
_BEGINNING, _GOING_ON = 1.15, 1.0
"""Factors of tokens per second that drafts must promise: to begin with drafts, and to go on. The
device waits once more for a beginning, and step times and acceptance rates are inexact.
"""
_MOST_WAIT = 2.0
"""Most steps without drafts that a wait counts as: in some, a kernel is loaded first."""
_FORGOTTEN = 1 - 1 / 256
"""Decay factor of what steps with drafts measured, in steps without any."""
_SHORTENED = 1 - 1 / 128
"""Decay factor of the wait before a step with drafts, in steps without any: the host may have been
slow for a while.
"""
_DOUBTED, _BELIEVED, _LEAST_ADDED = 1 - 1 / 128, 1.25, 0.5
"""Factors of the time that drafts are expected to add to a step: for each step without drafts, for
each step with some, and the least in all. Only steps with drafts measure it.
"""
_PROMISES = 1 - 1 / 256
"""Decay factor of promised and accepted tokens for each token that is promised."""
_ASSUMED = 16.0
"""Promised tokens that count as accepted before any were compared."""
_IN_VAIN = 0.01
"""Most of the time of steps without drafts that asking drafters in vain may take; as much again may
be taken to ask whether a head should guess.
"""
_MOST_SKIPPED = 64
"""Most steps that are planned without asking drafters."""


class Candidate(NamedTuple):
    """A sequence that could be drafted.

    Attributes:
        rate: probability that a drafted token is accepted if those before it are.
        most: number of drafted tokens available.
        token_s: seconds of drafting one more token, for all candidates of a drafter at once; 0 if
            the tokens are there already.
        reading_s: seconds of a step that its drafter needs to read the sequence first: all that
            this takes, spread over steps to come.
        chance: probability that the drafts can be right at all. It is less than 1 where they are
            chosen before the tokens in front of them are read.
    """

    rate: float
    most: int
    token_s: float = 0.0
    reading_s: float = 0.0
    chance: float = 1.0


def most_drafts(sequences: int) -> int:
    """Return the most drafts that are considered for each of so many sequences."""
    return min(MAX_DRAFTS, max(1, _MOST_CONSIDERED // max(sequences, 1)))


class DraftLengths(ABC):
    """Chooses how many drafts each sequence gets in a step. All but `choose` has a default, for
    drafts that cost nothing.
    """

    @abstractmethod
    def choose(
        self,
        candidates: Seq[Candidate],
        rows: int,
        *,
        beginning: bool = False,
        ahead: int = 0,
    ) -> list[int]:
        """Return the number of drafts for each candidate.

        Args:
            rows: rows of the step without drafts, one for each generating sequence.
            beginning: whether the step before, whose tokens are still to be read, has no drafts.
            ahead: the most rows of a step that is launched before the tokens of the one before are
                read; steps of more rows wait for them.
        """

    def prefers_waiting(self, candidates: Seq[Candidate], lengths: Seq[int], rows: int) -> bool:
        """Return whether rather to read the running step's tokens before drafts are chosen.

        Args:
            candidates, lengths: drafts that are chosen before, and how many of each.
            rows: rows of the step without drafts.
        """
        return False

    def least_chance(self, candidates: Seq[Candidate], lengths: Seq[int], rows: int) -> float:
        """Return the least probability of a draft that is worth its row, all before it included.

        Args:
            candidates, lengths: the drafts of the step, and how many of each.
            rows: rows of the step without drafts.
        """
        return 0.0

    def settle(self, promised: float, accepted: int) -> None:  # noqa: B027  # most need not
        """Record how many drafted tokens of a sequence a step accepted.

        Args:
            promised: expected number.
        """

    def steps_to_skip(self, asking_s: float, step_s: float) -> int:
        """Return how many steps to plan without asking drafters, after asking found no draft worth
        its rows.

        Args:
            asking_s: seconds that asking took.
            step_s: seconds from the plan of the step before to this one's.
        """
        return 0


class EveryDraft(DraftLengths):
    """Verifies every draft. For tests and measurements."""

    def choose(
        self,
        candidates: Seq[Candidate],
        rows: int,
        *,
        beginning: bool = False,
        ahead: int = 0,
    ) -> list[int]:
        return [each.most for each in candidates]


class _Trust:
    """The ratio of accepted to promised drafted tokens of recent steps, at most 1.

    Acceptance rates are estimates. Drafts are chosen where these are high, so the chosen ones are
    too high on average.
    """

    def __init__(self) -> None:
        self._promised = self._accepted = 0.0
        self.ratio = 1.0

    def observe(self, promised: float, accepted: float) -> None:
        self._add(promised, accepted, kept=_PROMISES**promised)

    def forget(self) -> None:
        """Move the ratio towards 1, so that drafts are tried again."""
        self._add(0.0, 0.0, kept=_FORGOTTEN)

    def _add(self, promised: float, accepted: float, kept: float) -> None:
        self._promised = kept * self._promised + promised
        self._accepted = kept * self._accepted + accepted
        self.ratio = min(1.0, (self._accepted + _ASSUMED) / (self._promised + _ASSUMED))


class WorthwhileDrafts(DraftLengths):
    """Verifies the drafts that raise the expected tokens per second of the whole step.

    A step with drafts costs more: it has more rows, its drafts may have to be computed, and the
    device waits while it is planned, because planning needs the previous step's tokens. The first
    step with drafts waits like the others, and so does the first step without, so beginning takes
    a larger gain than going on.

    Args:
        seconds: returns the durations of generating steps of each number of rows from one number
            to another, without the last ones if they are unknown; None if the first two are.
    """

    def __init__(self, seconds: Callable[[int, int], Seq[float] | None]) -> None:
        self._seconds = seconds
        self._waits = {True: ShortTimes(), False: ShortTimes()}
        """How long the device waits for a step, by the rows of the step without drafts: where the
        tokens before it are read before it is planned, and where they are not. Steps for which a
        CUDA graph was recorded are not observed.
        """
        self._trust = _Trust()
        self._added = 1.0
        """Factor of the time that drafts are expected to add. It falls while none are chosen: they
        are tried again after a time in which the machine was slow.
        """

    def settle(self, promised: float, accepted: int) -> None:
        self._trust.observe(promised, accepted)

    def steps_to_skip(self, asking_s: float, step_s: float) -> int:
        if asking_s <= _IN_VAIN * step_s:
            return 0
        return int(min(_MOST_SKIPPED, asking_s / max(_IN_VAIN * step_s, 1e-9)))

    def prefers_waiting(self, candidates: Seq[Candidate], lengths: Seq[int], rows: int) -> bool:
        drafts, rows = sum(lengths), max(rows, 1)
        seconds = self._seconds(rows, rows + drafts)
        if seconds is None or not drafts:
            return False
        in_vain = sum([(1 - c.chance) * n for c, n in zip(candidates, lengths, strict=True)])
        saved_s = self._waits[True].seconds(rows) - self._waits[False].seconds(rows)
        return (seconds[-1] - seconds[0]) * in_vain / drafts > saved_s

    def least_chance(self, candidates: Seq[Candidate], lengths: Seq[int], rows: int) -> float:
        drafts, rows = sum(lengths), max(rows, 1)
        seconds = self._seconds(rows, rows + drafts)
        if seconds is None or not drafts:
            return 0.0
        row_s = self._added * (seconds[-1] - seconds[0]) / (len(seconds) - 1)
        right = drafting_s = 0.0
        for each, length in zip(candidates, lengths, strict=True):
            chance = each.chance
            for _ in range(length):
                chance *= each.rate
                right += chance
            drafting_s = max(drafting_s, length * each.token_s)
        step_s = seconds[0] + drafts * row_s + drafting_s
        return (rows + self._trust.ratio * right) / step_s * row_s

    def observe_wait(self, seconds: float, rows: int, *, read: bool = True) -> None:
        """Record how long the device waited for a step.

        Args:
            rows: of the step without drafts.
            read: whether tokens were read before it was planned.
        """
        alone = self._seconds(rows, rows)
        most = math.inf if alone is None else _MOST_WAIT * alone[0]
        self._waits[read].observe(rows, min(seconds, most))

    def choose(
        self,
        candidates: Seq[Candidate],
        rows: int,
        *,
        beginning: bool = False,
        ahead: int = 0,
    ) -> list[int]:
        lengths = [0] * len(candidates)
        rows = max(rows, 1)
        alone = self._seconds(rows, rows + 1)
        possible = [each for each in candidates if each.most]
        if alone is None or not possible:
            return lengths
        waits = rows >= ahead
        wait_s = self._waits[waits].seconds(rows)
        least_rate = (_BEGINNING if beginning else _GOING_ON) * rows / alone[0]
        best: Seq[tuple[float, int, int]] = ()
        # Most questions end here: not even if all chances came true without further time.
        chances = sum([each.chance * each.rate / max(1.0 - each.rate, 0.01) for each in possible])
        step_s = alone[0] + self._added * (alone[1] - alone[0])
        if rows + self._trust.ratio * chances > least_rate * (step_s + wait_s):
            best = self._best(candidates, rows, ahead, least_rate=least_rate)
        if best:
            self._added = min(1.0, self._added * _BELIEVED)
        elif beginning:
            self._waits[waits].shorten(rows, _SHORTENED)
            self._trust.forget()
            self._added = max(_LEAST_ADDED, self._added * _DOUBTED)
        for _, _, number in best:
            lengths[number] += 1
        return lengths

    def _best(
        self, candidates: Seq[Candidate], rows: int, ahead: int, *, least_rate: float
    ) -> Seq[tuple[float, int, int]]:
        """Return those of the likeliest drafts with which a step yields the most tokens per second;
        none if that is at most `least_rate`.
        """
        drafts = _likeliest(candidates)
        seconds = self._seconds(rows, rows + len(drafts)) if drafts else None
        if seconds is None:
            return ()
        drafts = drafts[: len(seconds) - 1]
        trust, expected = self._trust.ratio, float(rows)
        wait_s, drafting_s, reading_s = self._waits[rows >= ahead].seconds(rows), 0.0, 0.0
        best, best_rate = 0, least_rate
        for count, (unlikelihood, depth, number) in enumerate(drafts, 1):
            expected -= trust * unlikelihood
            if token_s := candidates[number].token_s:
                drafting_s = max(drafting_s, depth * token_s)
                reading_s += candidates[number].reading_s if depth == 1 else 0.0
            step_s = seconds[0] + self._added * (seconds[count] - seconds[0])
            if rows + count == ahead + 1:  # too many rows to be launched before tokens are read
                wait_s = self._waits[True].seconds(rows)
            rate = expected / (step_s + wait_s + drafting_s + reading_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return drafts[:best]


def _likeliest(candidates: Seq[Candidate]) -> list[tuple[float, int, int]]:
    """Return the drafted tokens that are considered, the likeliest first, then the earliest.

    Lists of plain tuples take less time than arrays here, and the device waits for it.

    Returns:
        For each token the negative of its chance to be accepted, its number in its draft, from 1,
        and the number of its candidate.
    """
    most = most_drafts(len(candidates))
    found = list[tuple[float, int, int]]()
    for number, each in enumerate(candidates):
        chance, rate = each.chance, each.rate
        for depth in range(1, min(each.most, most) + 1):
            chance *= rate
            if chance < _LEAST_CHANCE:
                break
            found.append((-chance, depth, number))
    found.sort()
    return found
