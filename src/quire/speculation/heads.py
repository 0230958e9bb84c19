"""The drafter that proposes the tokens of the model's draft head."""

from __future__ import annotations

from collections.abc import Mapping

from quire.core.speculation import HEAD
from quire.scheduler.drafts import Draft, DraftQuery, LookupDrafter
from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.step_times import ShortTimes

MOST = 4
"""Tokens that a head guesses in a row; further ones are seldom right."""


class HeadDrafter(LookupDrafter):
    """Drafts the tokens that the draft head guessed after each sequence's last token.

    Args:
        most: the most tokens that the head guesses in a row.
        name: as metrics and requests call it.
    """

    looks_ahead = False

    def __init__(self, most: int = MOST, name: str = HEAD) -> None:
        self.most, self.name = most, name
        self._guesses: Mapping[int, tuple[int, ...]] = {}
        self._times = ShortTimes()
        """Seconds of a guess, by the number of sequences."""

    def take(self, guesses: Mapping[int, tuple[int, ...]]) -> None:
        """Store the guesses of the last step, by sequence number."""
        self._guesses = guesses

    def left_out(self, plan: StepPlan) -> int:
        """Return how many rows of a step that is done were left out, because their guesses are
        unlikely. Call it before `take` for that step.
        """
        count = 0
        for each in plan.sequences if plan.follows else ():
            if each.count > 1 and not (each.tokens or each.run):
                guessed = self._guesses.get(each.number, ())[: each.count - 1]
                count += len([token for token in guessed if token < 0])
        return count

    def observe(self, plan: StepPlan, result: StepResult, known_s: float) -> None:
        """Record what the guesses of a finished step cost.

        Args:
            known_s: seconds of such a step without guesses; 0 if unknown.
        """
        if known_s:
            seconds = max(0.0, result.seconds - known_s) / plan.guess
            self._times.observe(len(result.guesses), seconds)

    def token_s(self, sequences: int) -> float:
        return self._times.seconds(max(1, sequences))

    def draft(self, query: DraftQuery) -> Draft | None:
        guessed = self._guesses.get(query.number)
        return None if guessed is None else Draft(guessed[: query.limit], self.name)
