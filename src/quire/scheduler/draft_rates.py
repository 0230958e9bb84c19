"""Acceptance rates of drafts, of each sequence and of all. Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from quire.scheduler.drafts import DraftState, Foreseen, Grade

_OWN_WEIGHT, _COMMON_WEIGHT = 1 / 16, 1 / 64
"""Weight of the newest outcome in the acceptance rate of one sequence, and in that of all. First
outcomes weigh more.
"""
_OTHERS = 4
"""Number of a sequence's own outcomes that the rate of all sequences counts as."""
_FIRST_RATE, _FIRST_OUTCOMES = 0.7, 2
"""Acceptance rate assumed before any draft was compared, and how many outcomes it counts as. It is
high, so that drafters that have to compute are tried.
"""
REGAINED = 1 / 512
"""Fraction by which acceptance rates of a drafter that is not asked move towards the one assumed
first, in each step.
"""


class AcceptanceRates:
    """Probabilities that a drafted token is right if those before it are, by grade."""

    def __init__(self) -> None:
        self._common: dict[Grade, float] = {}
        self._compared: Counter[Grade] = Counter()

    def of(self, state: DraftState, grade: Grade) -> float:
        """Return the rate of a sequence's drafts; that of all sequences before it has its own."""
        own = state.rates.get(grade)
        return self._common.get(grade, _FIRST_RATE) if own is None else own

    def compare(self, state: DraftState, foreseen: Foreseen, known: Seq[int]) -> None:
        """Compare guesses with the tokens that followed, up to the first that is wrong.

        Args:
            known: the sequence's tokens.
        """
        position, tokens, grade = foreseen
        compared, all_compared = state.compared[grade], self._compared[grade]
        common = self._common.get(grade, _FIRST_RATE)
        own = state.rates.get(grade, common)
        for guess, token in zip(tokens, known[position:], strict=False):
            compared, all_compared = compared + 1, all_compared + 1
            right = float(guess == token)
            own += max(_OWN_WEIGHT, 1 / (_OTHERS + compared)) * (right - own)
            weight = max(_COMMON_WEIGHT, 1 / (_FIRST_OUTCOMES + all_compared))
            common += weight * (right - common)
            if not right:
                break
        if compared > state.compared[grade]:
            state.compared[grade], self._compared[grade] = compared, all_compared
            state.rates[grade], self._common[grade] = own, common

    def reconsider(
        self, states: Iterable[DraftState], grade: Grade, steps: int, *, common: bool
    ) -> None:
        """Raise the estimated acceptance of a drafter that was not asked in so many steps, so that
        it is tried again.

        Args:
            states: of the sequences that it was not asked for.
            common: whether it was asked for none. Sequences to come, which have no rate of their
                own, would never try it otherwise.
        """
        kept = (1 - REGAINED) ** steps
        for rates in (*[each.rates for each in states], *([self._common] if common else ())):
            if grade in rates:
                rates[grade] = _FIRST_RATE + kept * (rates[grade] - _FIRST_RATE)
