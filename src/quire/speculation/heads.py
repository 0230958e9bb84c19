"""The drafter that proposes the tokens of the model's draft head."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.speculation import HEAD
from quire.scheduler.drafts import Draft, DraftQuery
from quire.scheduler.plan import StepPlan, StepResult

MOST = 4
"""Tokens that a head guesses in a row; further ones are seldom right."""


class HeadDrafter:
    """Drafts the tokens that the draft head guessed after each sampled token.

    Args:
        most: the most tokens that the head guesses in a row.
    """

    name = HEAD
    looks_ahead = False

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._guesses: dict[int, tuple[int, tuple[tuple[int, ...], ...]]] = {}

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Store the guesses of a finished step."""
        firsts = {each.number: each.end - each.sampled + 1 for each in plan.sequences}
        self._guesses = {n: (firsts[n], guesses) for n, guesses in result.guesses.items()}

    def token_s(self, sequences: int) -> float:
        return 0.0

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft | None]:
        return [self._draft(each) for each in queries]

    def forget(self, number: int) -> None:
        pass

    def _draft(self, query: DraftQuery) -> Draft | None:
        if query.number not in self._guesses:
            return None
        position, guesses = self._guesses[query.number]
        guessed = guesses[len(query.tokens) - 1 - position]
        return Draft(guessed[: query.limit], self.name)
