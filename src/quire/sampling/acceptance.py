"""Acceptance of drafts: decides which of a step's sampled tokens stand. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many leading tokens of `sampled` stand: one, and one more for each right draft.

    A token depends on the tokens before it, on the sequence's seed and on its position, and on
    nothing else. So a draft is right if it is the very token that was sampled in its place, at any
    temperature; the answer is the same as without drafts.

    Args:
        drafts: guesses of the first tokens of `sampled`.
        sampled: one token more than there are drafts.
    """
    for number, draft in enumerate(drafts):
        if sampled[number] != draft:
            return number + 1
    return len(drafts) + 1
