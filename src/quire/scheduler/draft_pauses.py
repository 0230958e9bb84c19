"""Pauses between questions to drafters. Pure Python."""

from __future__ import annotations

from quire.scheduler.draft_lengths import DraftLengths

PATIENCE = 4
"""Number of vain questions in a row without a pause, for drafters that look up the last tokens of
an answer in other texts. At an answer's start, and behind a text that it repeated, too few tokens
have come for a match.
"""


class Pauses:
    """Spaces out questions that find no draft worth its rows, so that asking takes little time.

    The first pauses are short, and those after drafts: a few more tokens may agree with an earlier
    text.

    Args:
        patience: number of vain questions in a row that no pause follows.
    """

    def __init__(self, lengths: DraftLengths, patience: int = 0) -> None:
        self._lengths, self._patience = lengths, patience
        self._left = self._in_vain = 0
        self.steps = 1
        """Number of steps since the last question, this one included."""

    def passes(self) -> bool:
        """Return whether to plan this step without asking."""
        if self._left:
            self._left -= 1
            self.steps += 1
            return True
        return False

    def asked(self, asking_s: float, step_s: float, *, in_vain: bool) -> None:
        """Note how long asking took; for the times see `DraftLengths.steps_to_pass`."""
        self.steps = 1
        self._in_vain = self._in_vain + 1 if in_vain else 0
        beyond = max(0, self._in_vain - self._patience)
        pause = self._lengths.steps_to_pass(asking_s, step_s) if beyond else 0
        self._left = min(pause, (1 << beyond) - 1)
