"""How a row's token is drawn from its logits, where a device's kernels do that."""

from __future__ import annotations

from typing import NamedTuple


class Draw(NamedTuple):
    """One row's draw: min_p, top_k, then top_p of what is left, then an inverse transform.

    Attributes:
        temperature: 0 takes the likeliest token.
        min_p: least weight of a token, relative to the likeliest one's.
        top_k: number of likeliest tokens that stay; 0 for all.
        top_p: a token stays while the likelier ones hold less than this share; 1 for all.
        candidates: the most tokens that are ranked, best first; 0 if they stay in order of their
            ids. More than 128 are drawn in two levels: a block of 128, and a token in it.
        block, inside: uniform numbers in [0, 1) for the two levels; one level takes `inside`.
    """

    temperature: float
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    candidates: int = 0
    block: float = 0.0
    inside: float = 0.0


ALL = 2**31 - 1
"""As `candidates`: all tokens are ranked."""
GREEDY = Draw(0.0)
"""Takes the likeliest token."""
