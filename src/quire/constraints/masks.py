"""Masks over the vocabulary, one bit a token, as llguidance packs them. Needs numpy only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TokenMask: TypeAlias = npt.NDArray[np.uint32]
"""uint32 [ceil(V / 32)]: bit i % 32 of word i // 32 allows token i."""


def mask_of(tokens: Iterable[int], vocab_size: int) -> TokenMask:
    """Return the mask that allows `tokens` only. A single token is forced."""
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def allows(mask: TokenMask, token: int) -> bool:
    """Return whether a mask allows a token."""
    return bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def first_of(mask: TokenMask) -> int | None:
    """Return the lowest token that a mask allows; None if it allows none."""
    (words,) = np.nonzero(mask)
    if not len(words):
        return None
    word = int(words[0])
    bits = int(mask[word])
    return word * 32 + (bits & -bits).bit_length() - 1
