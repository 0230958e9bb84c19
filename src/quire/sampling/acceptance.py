"""Acceptance of drafts: decides which of a step's sampled tokens are kept. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many leading tokens of `sampled` are kept: one, plus one for each right draft.

    A token depends only on the tokens before it, the sequence's seed and its position. So a draft
    is right if it equals the token sampled in its place, at any temperature, and the answer is the
    same as without drafts.

    Args:
        drafts: drafts of the first tokens of `sampled`.
        sampled: sampled tokens, one more than drafts.
    """
    for number, draft in enumerate(drafts):
        if sampled[number] != draft:
            return number + 1
    return len(drafts) + 1
