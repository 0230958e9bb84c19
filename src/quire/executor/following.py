"""Rows that begin where the drafts of the step before end to be right, and verify its guesses."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from quire.device.device import current_device
from quire.device.dtypes import int32
from quire.device.host_copy import HostCopy
from quire.sampling.acceptance import count_accepted
from quire.sampling.rows import Moved
from quire.scheduler.plan import ScheduledSequence, StepPlan

ANY_ROWS = 1 << 30
"""More rows than any step has."""
GIVEN = -(1 << 31)
"""Stands for a token that is given otherwise."""
_NO_TOKEN = -1


class Kept(NamedTuple):
    """How far a step gets with its drafts, of each of the N sequences that sample.

    Attributes:
        tokens: int32 `[R]`, the sampled ones.
        guesses: int32 `[N, count]`, the tokens guessed after the row that a sequence goes on from;
            None if there are none.
        rows: these rows, int32 `[N]`, if the step computes them: where a head is open, and any
            sequence has drafts.
        lasts: the last sampled row of each sequence.
        places: the place of each sequence among the N, by number.
    """

    tokens: HostCopy
    guesses: HostCopy | None
    rows: mx.array | None
    lasts: Sequence[int]
    places: Mapping[int, int]


def resolved(plan: StepPlan, before: Kept) -> StepPlan:
    """Return a plan whose rows follow a step that is done, with their places and tokens."""
    tokens = before.tokens.read().tolist()
    guesses = None if before.guesses is None else before.guesses.read().tolist()
    found = list[ScheduledSequence]()
    for each in plan.sequences:
        if each.follows:
            place = before.places[each.number]
            first, last = before.lasts[place] - each.behind, before.lasts[place]
            right = count_accepted(each.verified, tokens[first : last + 1]) - 1
            own = array("i", [tokens[first + right]])
            if each.run:
                own.extend(each.run[right + 1 : right + each.count])
            elif each.count > 1:
                assert guesses is not None, "drafts on the device were guessed"
                own.extend([max(0, token) for token in guesses[place][: each.count - 1]])
            each = _at(each, own, rejected=each.behind - right)
        found.append(each)
    return replace(plan, sequences=tuple(found), follows=False)


def _at(each: ScheduledSequence, tokens: array[int], rejected: int) -> ScheduledSequence:
    """Return rows that begin `rejected` rows earlier, with their tokens."""
    positions = each.positions
    if isinstance(positions, range):
        positions = range(positions.start - rejected, positions.stop - rejected)
    else:
        positions = positions - np.float32(rejected)  # behind the prompt, alike in all axes
    sampling = tuple([row._replace(position=row.position - rejected) for row in each.sampling])
    return each._replace(
        start=each.start - rejected,
        tokens=tokens,
        positions=positions,
        sampling=sampling,
        verified=(),
        run=(),
    )


class RowsBehind(NamedTuple):
    """How rows depend on the step before, for a kernel that places them.

    Attributes:
        rows: five integers for each row. The first sampled row that its sequence may go on from;
            the number of drafts behind that row; where these begin in `texts`; how far the row is
            behind the first one of its sequence, -1 - n for a row whose token n is known, or
            `GIVEN` for one whose token stays; where the run begins in `texts`, or -1 - n if guesses
            n and following are used instead.
        texts: drafts and runs.
    """

    rows: array[int]
    texts: array[int]


class Following:
    """Rows of a step that follows a running one: their tokens and places are on the device.

    Args:
        sequences: of the step, in the order of its rows.
        before: the running step.
        given: whether tokens are given otherwise, and only places are behind that step.

    Attributes:
        behind: the most rows by which a sequence begins earlier than it says.
    """

    def __init__(
        self, sequences: Sequence[ScheduledSequence], before: Kept, *, given: bool = False
    ) -> None:
        self._sequences, self._before, self.given = sequences, before, given
        self._tokens: mx.array | None = None
        self.behind = max([each.behind for each in sequences])
        self._operations = current_device().operations

    @cached_property
    def _kept(self) -> mx.array:
        """The sampled row that each sequence of the running step goes on from, int32 `[N]`."""
        before = self._before
        if before.rows is not None or not self.behind:
            return int32(before.lasts) if before.rows is None else before.rows
        drafts = [_NO_TOKEN] * (before.lasts[-1] + 1)
        for each in self._sequences:
            if each.verified:
                last = before.lasts[before.places[each.number]]
                drafts[last - each.behind : last] = each.verified
        starts = [0, *[last + 1 for last in before.lasts]]
        return self._operations.first_different(before.tokens.array, int32(drafts), starts)

    @cached_property
    def _rejected(self) -> mx.array:
        """By how many rows each row begins earlier, int32 `[T]`."""
        places = list[int]()
        for each in self._sequences:
            places += [self._before.places[each.number] if each.behind else -1] * each.count
        return self._operations.rows_rejected(self._kept, self._before.lasts, places=places)

    @property
    def before(self) -> Kept:
        """The running step."""
        return self._before

    def places_of(self, sequences: Sequence[ScheduledSequence]) -> Following:
        """Return the places of rows of the same step that have other tokens."""
        return Following(sequences, self._before, given=True)

    def described(self) -> RowsBehind:
        """Return the kernel's operands for placing the rows."""
        before, rows, texts = self._before, array("i"), array("i")
        guessed = 0 if before.guesses is None else before.guesses.array.shape[1]
        for each in self._sequences:
            place = before.places.get(each.number, 0)
            own = before.lasts[place] - each.behind, each.behind, len(texts)
            texts.extend(each.verified)
            run = len(texts) if each.run else -1 - place * guessed
            texts.extend(each.run[: each.behind + each.count])
            known = [-1 - token for token in each.tokens]
            aheads = [*known, *range(each.count - len(known))]
            for ahead in [GIVEN] * each.count if self.given else aheads:
                rows.extend((*own, ahead, run))
        return RowsBehind(rows, texts)

    def placed(self, rejected: mx.array, tokens: mx.array) -> None:
        """Take in what the kernel found.

        Args:
            rejected: int32 `[T]`, by how many rows each row begins earlier.
            tokens: int32 `[T]`.
        """
        self._rejected, self._tokens = rejected, tokens

    def tokens(self) -> mx.array:
        """Return the rows' tokens, int32 `[T]`."""
        if self._tokens is not None:
            return self._tokens
        known, places = list[int](), list[int]()
        parts = [] if self._before.guesses is None else [self._before.guesses.array]
        guessed = parts[0].shape[1] if parts else 0
        if [each for each in self._sequences if each.run]:
            parts.append(self._of_runs())
        for each in self._sequences:
            known += each.tokens
            places += [-1] * len(each.tokens)
            if unread := each.count - len(each.tokens):
                first = 1 + guessed if each.run else 1
                known += [0, *range(first, first + unread - 1)]
                places += [self._before.places[each.number]] * unread
        guesses = mx.concatenate(parts, axis=1) if len(parts) > 1 else parts[0] if parts else None
        return self._operations.followed_tokens(
            self._before.tokens.array,
            self._kept,
            self._kept[:, None] if guesses is None else guesses,
            known=known,
            places=places,
        )

    def _of_runs(self) -> mx.array:
        """Return the tokens that runs expect after each row from which a sequence may continue,
        int32 `[N, count]`.
        """
        runs = [each for each in self._sequences if each.run]
        count = max([each.count for each in runs]) - 1
        behind = np.zeros((self._before.lasts[-1] + 1, count), np.int32)
        for each in runs:
            last, own = self._before.lasts[self._before.places[each.number]], each.count - 1
            for right in range(each.behind + 1):
                row = last - each.behind + right
                behind[row, :own] = each.run[right + 1 : right + 1 + own]
        return self._operations.wanted_rows(int32(behind), self._kept)

    def moved(self, numbers: mx.array, rows: Sequence[int] | range) -> mx.array:
        """Return numbers that are given for the rows' latest places, at their places.

        Args:
            numbers: int32 `[M]`.
            rows: the row that each number moves with; -1 for a number that does not move.
        """
        return self._operations.moved_back(numbers, self._rejected, rows)

    def sampling(self, sampling: Sequence[ScheduledSequence]) -> Moved:
        """Return how the sampled rows of sequences are moved."""
        rows, most, end = list[int](), list[int](), 0
        sampled = {each.number for each in sampling}
        for each in self._sequences:
            end += each.count
            if each.number in sampled:
                rows += range(end - each.sampled, end)
                most += [each.behind] * each.sampled
        if len(rows) == end:
            return Moved(self._rejected, most)
        return Moved(self._operations.wanted_rows(self._rejected, int32(rows)), most)
