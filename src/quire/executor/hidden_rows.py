"""Hidden states that a model computed for its rows, kept until a head that drafts reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from quire.executor.guessing import FinalStates, Guesser
from quire.executor.inputs import StepInputs
from quire.models.base import LanguageModel
from quire.scheduler.plan import ScheduledSequence

_MOST_BYTES = 256 << 20
"""Bytes of states that are kept of all sequences; beyond them the oldest go."""


@dataclass(slots=True)
class _Run:
    """States of neighbouring rows of one sequence.

    Attributes:
        start: index of the first row.
        pieces: arrays `[rows, width]`, in order.
    """

    start: int
    pieces: deque[mx.array] = field(default_factory=deque)

    @property
    def end(self) -> int:
        return self.start + sum(map(len, self.pieces))

    def cut(self, end: int) -> None:
        """Drop the rows from `end` on."""
        while self.pieces and (over := self.end - end) > 0:
            last = self.pieces.pop()
            if over < len(last):
                self.pieces.append(last[: len(last) - over])

    def drop(self, start: int) -> None:
        """Drop the rows before `start`."""
        while self.pieces and (before := start - self.start) > 0:
            first = self.pieces.popleft()
            if before < len(first):
                self.pieces.appendleft(first[before:])
            self.start += min(before, len(first))


class HiddenRows(Guesser):
    """The hidden states of each sequence's latest rows, kept for a drafter.

    It is a guesser because steps hand their states to guessers; it guesses nothing.

    Args:
        model: the model whose states are captured.
        most_bytes: bytes of states that are kept; beyond these the oldest rows go.
    """

    def __init__(self, model: LanguageModel, most_bytes: int = _MOST_BYTES) -> None:
        self._model = model
        self._most_bytes = most_bytes
        self._runs: dict[int, _Run] = {}
        """By sequence number, the one whose rows were computed longest ago first."""
        self._nbytes = 0

    # -- what steps give -----------------------------------------------------------------------

    def guess(
        self, states: FinalStates, tokens: mx.array, kept: mx.array | None, *, count: int
    ) -> None:
        assert states.hidden is not None, "models that give states compute all rows"
        self.read(states.inputs, states.hidden)

    def read(self, inputs: StepInputs, hidden: mx.array) -> None:
        width = hidden.shape[-1] - self._model.final(hidden).shape[-1]
        states = hidden[:, -width:] + 0  # a copy: the next CUDA graph writes where this one did
        first = 0
        taken = []
        for each in inputs.sequences:
            rows = states[first : first + each.count]
            first += each.count
            self._add(each, rows)
            taken.append(rows)
        self.arrays = tuple(taken)
        self._drop_oldest()

    # -- what a head reads ---------------------------------------------------------------------

    def span(self, number: int) -> range:
        """Return the rows of a sequence that are there."""
        run = self._runs.get(number)
        return range(0) if run is None else range(run.start, run.end)

    def rows(self, number: int, start: int, count: int) -> mx.array:
        """Return the states of some rows of a sequence, `[count, width]`."""
        run = self._runs[number]
        whole = run.pieces[0] if len(run.pieces) == 1 else mx.concatenate(list(run.pieces))
        return whole[start - run.start : start - run.start + count]

    def drop_before(self, number: int, start: int) -> None:
        """Drop the rows of a sequence before `start`, which were read."""
        if (run := self._runs.get(number)) is not None:
            before = _nbytes(run.pieces)
            run.drop(start)
            self._nbytes += _nbytes(run.pieces) - before

    def forget(self, number: int) -> None:
        """Drop the rows of a sequence."""
        if (run := self._runs.pop(number, None)) is not None:
            self._nbytes -= _nbytes(run.pieces)

    # -- within --------------------------------------------------------------------------------

    def _add(self, each: ScheduledSequence, rows: mx.array) -> None:
        """Add a step's rows of a sequence. Rows at the same places were drafts that were wrong."""
        run = self._runs.pop(each.number, None)
        before = 0 if run is None else _nbytes(run.pieces)
        if run is None or not run.start <= each.start <= run.end:
            run = _Run(each.start)
        run.cut(each.start)
        run.pieces.append(rows)
        self._runs[each.number] = run
        self._nbytes += _nbytes(run.pieces) - before

    def _drop_oldest(self) -> None:
        while self._nbytes > self._most_bytes and len(self._runs) > 1:
            self.forget(next(iter(self._runs)))
        if self._nbytes > self._most_bytes:
            ((number, run),) = self._runs.items()
            excess = self._nbytes - self._most_bytes
            row = _nbytes(run.pieces) // max(1, run.end - run.start)
            self.drop_before(number, run.start - -excess // row)


def _nbytes(pieces: Sequence[mx.array]) -> int:
    return sum(each.nbytes for each in pieces)
