"""The drafter that proposes the tokens of the model's draft head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from quire.core.speculation import HEAD
from quire.scheduler.drafts import Draft, DraftQuery


class HeadDrafter:
    """Drafts the tokens that the draft head guessed after each sampled token."""

    name = HEAD
    looks_ahead = False
    most = 4
    """Tokens that a head guesses in a row; further ones are seldom right."""

    def __init__(self) -> None:
        self._guesses: npt.NDArray[np.int32] | None = None
        self._rows: Mapping[int, tuple[int, int]] = {}

    def observe(
        self, guesses: npt.NDArray[np.int32] | None, rows: Mapping[int, tuple[int, int]]
    ) -> None:
        """Store the guesses of a finished step.

        Args:
            guesses: `[R, count]` for the sampled rows; None if the step made none.
            rows: for each sequence number, its first row and the position of the token sampled
                there.
        """
        self._guesses, self._rows = guesses, rows

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft | None]:
        return [self._draft(each) for each in queries]

    def forget(self, number: int) -> None:
        pass

    def _draft(self, query: DraftQuery) -> Draft | None:
        if self._guesses is None or query.number not in self._rows:
            return None
        first, position = self._rows[query.number]
        guessed = self._guesses[first + len(query.tokens) - 1 - position]
        return Draft(tuple(guessed[: query.limit].tolist()), self.name)
