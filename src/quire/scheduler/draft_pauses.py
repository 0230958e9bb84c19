"""Pauses between the steps in which drafters are asked. Pure Python."""

from __future__ import annotations

from quire.scheduler.draft_lengths import DraftLengths

LOOKUPS_BEFORE_PAUSE = 4
"""Number of lookups in a row that find nothing before the first pause. At an answer's start, and
behind a text that it repeated, too few tokens have come for a match with other texts.
"""


class Pauses:
    """Chooses the steps that are planned without asking drafters, owned by `Drafting`.

    A pause follows a question that found no draft worth its rows, so that asking takes little time.
    The first pauses are short, as are those after drafts: a few more tokens may agree with an
    earlier text.

    Args:
        before_first: number of questions in a row that find nothing before the first pause.
    """

    def __init__(self, lengths: DraftLengths, before_first: int = 0) -> None:
        self._lengths, self._before_first = lengths, before_first
        self._left = self._in_vain = 0
        self.steps = 1
        """Number of steps since the last question, this one included."""

    def skips_step(self) -> bool:
        """Return whether to plan this step without asking, and count the step."""
        if self._left:
            self._left -= 1
            self.steps += 1
            return True
        return False

    def asked(self, asking_s: float, step_s: float, *, in_vain: bool) -> None:
        """Start the pause that follows a question.

        Args:
            asking_s, step_s: see `DraftLengths.steps_to_skip`.
            in_vain: whether no draft was worth its rows.
        """
        self.steps = 1
        self._in_vain = self._in_vain + 1 if in_vain else 0
        beyond = max(0, self._in_vain - self._before_first)
        pause = self._lengths.steps_to_skip(asking_s, step_s) if beyond else 0
        self._left = min(pause, (1 << beyond) - 1)
