"""How many prompt tokens a step may read, so that running streams do not stall.

The time of a step is modelled as that of a step that only generates, plus a cost of its own, a
cost a chunk (its own attention in every layer) and a cost a token. All of them are learned from the
steps that ran.

Beside streams that generate, prompts have a share of the time. Where a step's own cost is small,
every step reads as much as fits into its share. Where it is large (a GPU generates by recorded
steps of a few milliseconds, and one that reads is launched layer by layer), a step reads a larger
chunk, and the next ones only generate until the share has made up for it. What a step was expected
to take is put right when it is done, so that the share holds on a machine that is now fast, now
slow.

A recorded step may also read a few rows, at the cost of one that generates as many. Prompts that
few of those read to their end are read so: nobody stalls, and the first token comes sooner.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low
from typing import NamedTuple

_LEAST_S = 1e-6
"""Of a step: a clock may stand still meanwhile."""
_ALONE = 5
"""Steps that only generated, of whose times the median counts: the first often takes longer."""
_READS_IN_A_ROW = 16
"""Steps that read beside streams, one after the other, before one only generates: that alone shows
what generating costs."""
_BELIEVED = 4
"""Times its cost, at most, that a step is set against the share of prompts: a machine that stands
still for a while makes nobody wait as long again."""
_DECAY = 0.95
"""Weight of older steps, for each step that follows."""
_MIN_TOKENS = 4
_FIRST_TOKENS = 32
_TOKENS_OVER_CHUNKS = 4
"""Where nobody generates, a step's tokens cost at least so many times what its chunks themselves
do: a step of few rows takes nearly as long as one of many, since it reads all weights too."""
_MAX_CHUNKS = 2
"""Of a step where several prompts wait: the oldest one's and the shortest one's."""
_SMALLER = 0.7
"""Every other step reads this share of what it may: from chunks of one size nobody could tell what
a chunk costs and what a token."""
_STEP, _CHUNK, _TOKEN, _SECONDS = range(4)
_TERMS = (
    (_TOKEN,),
    (_CHUNK, _TOKEN),
    (_STEP, _TOKEN),
    (_STEP, _CHUNK, _TOKEN),
    (_CHUNK,),
    (_STEP,),
)
"""Which of a step, a chunk and a token cost something; of fits as good as each other the first."""
_REMEMBERED = 32
"""Steps that costs are learned from."""
_SLOW, _SLOW_WEIGHT = 1.25, 0.05
"""A step that took so many times its cost has this weight: something slows a step down now and
then, and nothing speeds one up."""
_PASSES = 4
"""Fits at most, each of which knows the slow steps by the one before."""
_UNSEEN = 2
"""Steps that are planned while the time of none of them is known yet, at most."""
_CHANGED = 4
"""Slow steps in a row that are no accident: steps cost more from the first of them on."""
_MIN_PIVOT = 0.01
"""Share of a term's squares that elimination must leave, so that steps tell it from the others."""
_MIN_TOKEN_SHARE = 0.05
"""A token costs at least this share of the time a token takes with all other costs in it."""
_GROWTH = 2
"""Times the largest chunk that costs were learned from, at most: they are known for sizes like
those seen."""
_LEAST_RECORDED = 8
"""Rows that a recorded step must have left for prompts to be worth it."""
_RECORDED_STEPS = 4
"""Recorded steps that take about as long as one that is launched layer by layer, whatever it reads:
8 ms each with 64 rows, 35 to 45 ms (Gemma 4 26B-A4B in 4 bits on an H200)."""


_Shape = tuple[int, int, int]
"""Generating rows, chunks and prompt rows of a step."""


class PrefillBudget:
    """Sizes prompt chunks by time.

    Args:
        step_s: seconds aimed at for what a step reads of prompts, at most.
        stall_factor: more than 1. While one or two prompts are read, steps that generate take on
            average this many times as long as they do without. Each further prompt that waits adds
            as much again: those who wait for a first token count as much as those who have theirs.
        max_rows: rows of a step at most.
    """

    def __init__(self, step_s: float, stall_factor: float, max_rows: int) -> None:
        self._step_s = step_s
        self._stall_factor = stall_factor
        self._max_rows = max_rows
        self._cost = _StepCost()
        self._largest = _FIRST_TOKENS // _GROWTH
        self._smaller = False
        self._decode_s: dict[int, deque[float]] = {}
        self._ahead_s = 0.0
        """What prompts took beyond their share of the time, while others generated; below 0 what
        they left of a step's."""
        self._taken: deque[tuple[_Shape, float]] = deque(maxlen=_UNSEEN)
        """Of steps whose time is not known yet, what their prompts are expected to take of it."""
        self._reads_in_a_row = 0

    def room(self, decode_rows: int) -> int:
        """Rows that a step has left beside the generating ones."""
        return max(0, self._max_rows - decode_rows)

    def seconds(self, decode_rows: int, prompts: int = 1, *, sits_out: bool = False) -> float:
        """Time for prompts and their media in the next step, beside `decode_rows` generating rows.

        Args:
            prompts: how many wait, begun or not.
            sits_out: see `prompt_budget`.
        """
        if not decode_rows and not sits_out:
            return self._step_s
        return min(self._step_s, self._share(max(1, decode_rows), prompts))

    def _share(self, decode_rows: int, prompts: int) -> float:
        """Seconds that prompts have of each step beside `decode_rows` generating rows."""
        stall = (self._stall_factor - 1) * self._decode_estimate(decode_rows)
        return max(1, prompts - 1) * stall

    def prompt_budget(self, decode_rows: int, prompts: int = 1, *, sits_out: bool = False) -> int:
        """Prompt tokens that the next step may read beside `decode_rows` generating rows.

        Args:
            prompts: how many wait, begun or not.
            sits_out: whether somebody who generates has no row in this step, and waits for its end.

        Returns:
            0 while those who generate are owed time, see `begin`, or to see what they cost alone.
        """
        room = self.room(decode_rows)
        cost = self._cost.estimate
        if (decode_rows or sits_out) and self._ahead_s > 0:
            return 0
        if decode_rows and self._reads_in_a_row >= (_READS_IN_A_ROW if self._decode_s else 1):
            return 0
        if cost.token_s == 0:
            return min(room, _FIRST_TOKENS)
        seconds = self.seconds(decode_rows, prompts, sits_out=sits_out)
        # Never so few that the chunks' own cost outweighs them: that reads slower and stalls more.
        own_s = cost.own(min(max(1, prompts), _MAX_CHUNKS))
        least, worth_s = _FIRST_TOKENS, _TOKENS_OVER_CHUNKS * own_s
        if decode_rows > 0 or sits_out:  # within the step's aim, if its own cost is
            least, worth_s = _MIN_TOKENS, max(own_s, min(worth_s, self._step_s - own_s))
        tokens = max((seconds - own_s) / cost.token_s, worth_s / cost.token_s, least)
        tokens = min(room, tokens, self._largest * _GROWTH)
        # Rounded up: a budget of one token must not become none, or the prompt would never end.
        return math.ceil(tokens * _SMALLER) if self._smaller else int(tokens)

    def recorded(self, tokens: int, decode_rows: int, waiting: int, most_rows: int) -> int:
        """Prompt tokens of the next step: as many as fit into a recorded one, or more than that.

        Args:
            tokens: that a step may read which is not recorded.
            waiting: prompt tokens that can be read now.
            most_rows: of a recorded step; 0 if the next one cannot be.
        """
        room = most_rows - decode_rows
        if not tokens or not waiting or room < _LEAST_RECORDED:
            return tokens
        if waiting <= _RECORDED_STEPS * room:
            return min(room, waiting)
        # What is not recorded reads at least what recorded steps would in that time, and here, too,
        # sizes differ.
        least = _RECORDED_STEPS * room / (1 if self._smaller else _SMALLER)
        return max(tokens, min(int(least), self.room(decode_rows)))

    def _recorded_seconds(self, decode_rows: int, prompt_rows: int) -> float:
        """What prompt rows add to a recorded step of generating ones."""
        alone = self._decode_estimate(decode_rows) if decode_rows else 0.0
        return max(0.0, self._decode_estimate(decode_rows + prompt_rows) - alone)

    def beside_encoders(self, tokens: int, spent_s: float) -> int:
        """Of a step's prompt tokens those that fit beside encoders; half of them always do.

        Args:
            spent_s: what the encoders take of the time.
        """
        token_s = self._cost.estimate.token_s
        displaced = math.ceil(spent_s / token_s) if token_s else 0
        return tokens - min(displaced, tokens // 2)

    def begin(
        self,
        decode_rows: int,
        prompts: int,
        chunks: int,
        prompt_rows: int,
        *,
        sits_out: bool = False,
        recorded: bool = False,
    ) -> None:
        """A step is planned: what it reads is set against the share that prompts have of it.

        Where everybody who generates sits it out, prompts have no share: it is one of the steps in
        which somebody gets a token that these are a share of.
        """
        if not decode_rows and not sits_out:
            self._ahead_s = 0.0
            return
        if decode_rows:
            alone = recorded or not prompt_rows  # or shows what that many rows cost
            self._reads_in_a_row = 0 if alone else self._reads_in_a_row + 1
        taken = 0.0
        if prompt_rows and recorded:
            taken = self._recorded_seconds(decode_rows, prompt_rows)
        elif prompt_rows:
            taken = self._cost.estimate.of(chunks, prompt_rows)
            self._taken.append(((decode_rows, chunks, prompt_rows), taken))
        share = self._share(decode_rows, prompts) if decode_rows else 0.0
        self._ahead_s = max(-share, self._ahead_s + taken - share)

    def prompt_seconds(self, tokens: int) -> float | None:
        """How long reading so many prompt tokens is likely to take; None before any were."""
        cost = self._cost.estimate
        return None if cost.token_s == 0 else cost.of(1, tokens)

    def step_seconds(self, decode_rows: int, chunks: int, prompt_rows: int) -> float:
        """How long a step is likely to take; `step_s` before any was seen."""
        if not self._decode_s:
            return self._step_s
        return self.known_seconds(decode_rows, chunks, prompt_rows)

    def known_seconds(self, decode_rows: int, chunks: int, prompt_rows: int) -> float:
        """The same, of which what was never seen counts for nothing."""
        seconds = self._decode_estimate(decode_rows) if decode_rows and self._decode_s else 0.0
        if prompt_rows:
            seconds += self._cost.estimate.of(chunks, prompt_rows)
        return seconds

    def observe(
        self,
        decode_rows: int,
        chunks: int,
        prompt_rows: int,
        seconds: float,
        *,
        recorded: bool = False,
    ) -> None:
        """A step took this long: what it read is set against the share of prompts by that."""
        seconds = max(seconds, _LEAST_S)
        if prompt_rows == 0 or recorded:
            bucket = _bucket(decode_rows + prompt_rows)
            self._decode_s.setdefault(bucket, deque(maxlen=_ALONE)).append(seconds)
        else:
            base = self._decode_estimate(decode_rows) if decode_rows else 0.0
            taken = max(seconds - base, seconds * 0.1)
            self._put_right((decode_rows, chunks, prompt_rows), taken)
            self._cost.observe(chunks, prompt_rows, taken)
            self._smaller = not self._smaller
            self._largest = max(prompt_rows, _FIRST_TOKENS // _GROWTH, int(self._largest * _DECAY))

    def _put_right(self, shape: _Shape, taken: float) -> None:
        """A step's prompts took this long, which `begin` could only expect."""
        planned = next((each for each in self._taken if each[0] == shape), None)
        if planned is not None:
            self._taken.remove(planned)
            _, expected = planned
            self._ahead_s += min(taken, _BELIEVED * expected) - expected

    def _decode_estimate(self, rows: int) -> float:
        """From the nearest number of rows seen; a guess of the step time before any was."""
        if not self._decode_s:
            return self._step_s / 4
        bucket = _bucket(rows)
        nearest = min(self._decode_s, key=lambda seen: abs(seen - bucket))
        return median_low(self._decode_s[nearest])


class _Cost(NamedTuple):
    """Seconds: of a step that reads prompts, of each chunk, of each token; all 0 before any was."""

    step_s: float
    chunk_s: float
    token_s: float

    def own(self, chunks: int) -> float:
        """What a step of so many chunks costs beside its tokens."""
        return self.step_s + chunks * self.chunk_s

    def of(self, chunks: int, tokens: int) -> float:
        return self.own(chunks) + tokens * self.token_s


class _Fit(NamedTuple):
    """Costs by least squares, and the squares that they leave; a term that is left out costs 0."""

    residual: float
    cost: _Cost


class _StepCost:
    """Least squares of `seconds = step + chunks * chunk + tokens * token`, none of them below 0.

    Old steps fade, and those that took far longer than the fit says (a kernel was compiled or
    loaded) count little. On a GPU a step costs the host much that neither chunks nor tokens change.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float, float]] = deque(maxlen=_REMEMBERED)
        """1, chunks, tokens and seconds of the last ones, newest last."""
        self._sums: list[list[float]] = []
        """Of products of these with each other."""
        self.estimate = _Cost(0.0, 0.0, 0.0)

    def observe(self, chunks: int, tokens: int, seconds: float) -> None:
        if self._steps:  # an outlier must not throw the estimate far off
            last_s = self._steps[-1][_SECONDS]
            seconds = min(seconds, 2 * max(self.estimate.of(chunks, tokens), last_s))
        self._steps.append((1.0, float(chunks), float(tokens), seconds))
        slow = [False] * len(self._steps)
        for _ in range(_PASSES):
            self._sums = self._weighted(slow)
            self.estimate = cost = self._fitted()
            before, slow = slow, [_is_slow(step, cost) for step in self._steps]
            if len(slow) > _CHANGED and all(slow[-_CHANGED:]):
                while len(self._steps) > _CHANGED:
                    self._steps.popleft()
                slow = [False] * _CHANGED
            elif slow == before:
                break

    def _weighted(self, slow: list[bool]) -> list[list[float]]:
        sums = [[0.0] * 4 for _ in range(4)]
        for step, is_slow in zip(self._steps, slow, strict=True):
            weight = _SLOW_WEIGHT if is_slow else 1.0
            for own, x in zip(sums, step, strict=True):
                own[:] = [_DECAY * old + weight * x * y for old, y in zip(own, step, strict=True)]
        return sums

    def _fitted(self) -> _Cost:
        fits = filter(None, map(self._fit, _TERMS))
        cost = min(fits, key=lambda fit: fit.residual).cost
        alone = self._sums[_TOKEN][_SECONDS] / self._sums[_TOKEN][_TOKEN]
        return cost._replace(token_s=max(cost.token_s, _MIN_TOKEN_SHARE * alone))

    def _fit(self, terms: tuple[int, ...]) -> _Fit | None:
        """The fit of these terms; None where steps do not tell them apart, or one is below 0."""
        rows = [[*(self._sums[i][j] for j in terms), self._sums[i][_SECONDS]] for i in terms]
        for n, row in enumerate(rows):  # elimination; the matrix is symmetric and not negative
            if row[n] <= _MIN_PIVOT * self._sums[terms[n]][terms[n]]:
                return None
            for other in rows[:n] + rows[n + 1 :]:
                factor = other[n] / row[n]
                other[:] = [x - factor * y for x, y in zip(other, row, strict=True)]
        values = [0.0] * 3
        for n, term in enumerate(terms):
            values[term] = rows[n][-1] / rows[n][n]
        if min(values) < 0:
            return None
        explained = sum(values[i] * self._sums[i][_SECONDS] for i in terms)
        return _Fit(self._sums[_SECONDS][_SECONDS] - explained, _Cost(*values))


def _is_slow(step: tuple[float, float, float, float], cost: _Cost) -> bool:
    """Whether a step took far longer than its cost."""
    return step[_SECONDS] > _SLOW * (
        cost.step_s + step[_CHUNK] * cost.chunk_s + step[_TOKEN] * cost.token_s
    )


def _bucket(rows: int) -> int:
    """Numbers of rows that take about as long as each other: recorded steps are made for 2 ** n."""
    return (rows - 1).bit_length()
