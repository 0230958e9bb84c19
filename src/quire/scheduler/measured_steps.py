"""The step times of one model on one machine, by kind of step."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.scheduler.step_times import StepTimes

_FEWER_ROWS = 512
"""Most rows of a graphed step whose time depends on how much of its graph it fills."""


def _timed_as(rows: int) -> int:
    """Return how many rows a step is timed as: those of its graph, if they are many, which takes as
    long for fewer.
    """
    return rows if rows <= _FEWER_ROWS else 1 << (rows - 1).bit_length()


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Step times of one model on one machine.

    Attributes:
        generating: times of steps that only generate, and of all steps that run as CUDA graphs.
        reading: times of steps that only read prompts.
        reading_beside: seconds that prompt rows add to a generating step, by their number.
    """

    generating: StepTimes = field(default_factory=lambda: StepTimes(_timed_as))
    reading: StepTimes = field(default_factory=StepTimes)
    reading_beside: StepTimes = field(default_factory=StepTimes)

    def prompts(self, decode_rows: int) -> StepTimes:
        """Return the table of prompts beside so many generating rows, or the nearest known one."""
        alone, beside = self.reading, self.reading_beside
        first, second = (beside, alone) if decode_rows else (alone, beside)
        return first if first.largest or not second.largest else second
