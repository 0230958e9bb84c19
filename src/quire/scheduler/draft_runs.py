"""Drafts of steps that are planned while the step before runs. Pure Python.

The host has not read which token the running step samples, nor which of its drafts are right. A
*run* is what a drafter expects from that step's first token on. The next step's drafts are the part
of the run behind the token that the running step ends with: the device finds it by the number of
drafts that are right. If that token is not the one expected, the drafts may be right nevertheless:
a text that is repeated with one word changed goes on as before.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.cache.reuse import common_length
from quire.scheduler.draft_lengths import Candidate
from quire.scheduler.drafts import UNREAD, Draft

BESIDE = -1
"""Grade of drafts behind a token that was not the expected one."""


class Run(NamedTuple):
    """Tokens expected from the first one on that the running step samples.

    Attributes:
        draft: these tokens.
        verified: number of drafts that the running step verifies.
        length: number of drafts of the next step.
    """

    draft: Draft
    verified: int
    length: int = 0

    def candidate(self, running: Draft, rate: float, beside: float) -> Candidate:
        """Return the next step's drafts as a candidate.

        Args:
            running: what the running step verifies.
            rate: probability that an expected token is right if those before it are.
            beside: the same behind a token that was not the expected one.
        """
        as_expected = rate ** (common_length(self.draft.tokens, running.tokens) + 1)
        chance = as_expected + (1 - as_expected) * min(1.0, beside / max(rate, 1e-9))
        most = len(self.draft.tokens) - self.verified - 1
        return Candidate(rate, most, chance=chance)

    def drafts(self, count: int) -> Draft:
        """Return the next step's drafts, whose tokens are not known yet."""
        own = self.draft
        return Draft((UNREAD,) * count, own.drafter, own.grade, run=own.tokens)


def settled(draft: Draft, accepted: int, last: int) -> Draft:
    """Return drafts of a run with their tokens.

    Args:
        accepted: number of right drafts in the step before.
        last: the token that it ended with.
    """
    tokens = draft.run[accepted + 1 : accepted + 1 + len(draft.tokens)]
    expected = draft.run[accepted] == last
    return Draft(tokens, draft.drafter, draft.grade if expected else BESIDE)
