"""Ends reasoning that exceeds its budget. Pure Python."""

from __future__ import annotations

from copy import copy

from quire.constraints.sequence import SequenceWatcher, Spelling
from quire.core.request import ThinkingBudget


class ThinkingState:
    """Follows one answer and forces its reasoning to end when the budget is spent.

    Reasoning is open from `start_ids` (from the first token when they are empty) until `end_ids`
    appear as a whole, written by the model or forced. The budget is for all reasoning of an answer
    together. Neither `start_ids` nor forced tokens count.

    Args:
        spelling: see `SequenceWatcher`.

    Raises:
        ValueError: the budget names no `end_ids`, so that no reasoning could ever be ended.
    """

    def __init__(self, budget: ThinkingBudget, spelling: Spelling | None = None) -> None:
        if not budget.end_ids:
            raise ValueError("a thinking budget needs the tokens that end reasoning")
        self._budget = budget
        self._start = SequenceWatcher(budget.start_ids, spelling)
        self._end = SequenceWatcher(budget.end_ids, spelling)
        self._thinking = not budget.start_ids
        self._left = budget.max_tokens
        self._forced: list[int] = []
        self._force_if_spent()

    def copy(self) -> ThinkingState:
        """Return an independent copy of the state."""
        other = copy(self)
        other._start, other._end = self._start.copy(), self._end.copy()
        other._forced = list(self._forced)
        return other

    @property
    def thinking(self) -> bool:
        """Whether reasoning is open."""
        return self._thinking

    def forced(self) -> int | None:
        """The token that must come next, or None while the model is free."""
        return self._forced[0] if self._forced else None

    def accept(self, token: int) -> None:
        """Advance by the next token of the answer, which is the forced one if there is one.

        Raises:
            ValueError: another token came than the forced one.
        """
        forced = self.forced()
        if forced is not None and token != forced:
            raise ValueError(f"token {token} was sampled although {forced} was forced")
        started, ended = self._start.push(token), self._end.push(token)
        if forced is not None:
            self._forced.pop(0)
            self._thinking = bool(self._forced)
        elif not self._thinking:
            self._thinking = started
            self._force_if_spent()
        elif ended:
            self._thinking = False
        else:
            self._left -= 1
            self._force_if_spent()

    def _force_if_spent(self) -> None:
        """Force the rest of `end_ids`, part of which the model may have written."""
        if self._thinking and self._left <= 0:
            self._forced = list(self._budget.end_ids[self._end.matched() :])
