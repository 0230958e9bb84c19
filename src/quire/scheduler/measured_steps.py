"""The step times of one model on one machine, by kind of step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.scheduler.step_times import StepTimes

_FEWER_ROWS = 512
"""Most rows of a graphed step whose time depends on how much of its graph it fills."""
_GROWTH = 2
"""Times of steps that sample all rows count as known up to this multiple of the most rows that a
step sampled so far.
"""


def _timed_as(rows: int) -> int:
    """Return how many rows a step is timed as: those of its graph, if they are many, which takes as
    long for fewer.
    """
    return rows if rows <= _FEWER_ROWS else 1 << (rows - 1).bit_length()


class MostSampled:
    """The most rows that a step sampled, which `MeasuredSteps` owns.

    Attributes:
        rows: 0 before any step.
    """

    def __init__(self) -> None:
        self.rows = 0

    def observe(self, rows: int) -> None:
        self.rows = max(self.rows, rows)


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Step times of one model on one machine.

    Attributes:
        generating: times of steps that only generate, and of all steps that run as CUDA graphs.
        reading: times of steps that only read prompts.
        reading_beside: seconds that prompt rows add to a generating step, by their number.
        sampled: the most rows of sequences that generate in a step.
    """

    generating: StepTimes = field(default_factory=lambda: StepTimes(_timed_as))
    reading: StepTimes = field(default_factory=StepTimes)
    reading_beside: StepTimes = field(default_factory=StepTimes)
    sampled: MostSampled = field(default_factory=MostSampled)

    def sampling(self, first: int, last: int) -> Sequence[float] | None:
        """Return the times of steps that sample `first` to `last` rows, as far as they are known;
        None if the first two are not.

        Steps that read prompts as graphs tell nothing of how long the logits of many rows take, nor
        of what is made or compiled for the first of them.
        """
        known = min(last, _GROWTH * self.sampled.rows)
        return self.generating.curve(first, known) if known > first else None

    def prompts(self, decode_rows: int) -> StepTimes:
        """Return the table of prompts beside so many generating rows, or the nearest known one."""
        alone, beside = self.reading, self.reading_beside
        first, second = (beside, alone) if decode_rows else (alone, beside)
        return first if first.largest or not second.largest else second
