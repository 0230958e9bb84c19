"""Constrains the times in transcripts by the rules of `core.request.Timestamps`."""

from __future__ import annotations

from copy import copy

import numpy as np

from quire.constraints.masks import TokenMask
from quire.core.request import Timestamps


class TimestampState:
    """The times of one transcript so far, and the tokens that may follow them. A segment is a start
    time, its text, and an end time.
    """

    def __init__(self, rules: Timestamps, vocab_size: int) -> None:
        self._rules = rules
        self._vocab_size = vocab_size
        self._generated = 0
        self._latest: int | None = None
        self._times_in_a_row = 0

    def copy(self) -> TimestampState:
        """Return an independent copy of the state."""
        return copy(self)

    def mask(self) -> TokenMask:
        """Return the mask of tokens that may come next."""
        rules, latest = self._rules, self._latest
        ended = self._times_in_a_row == 1 and self._generated > 1  # by the last token, a time
        allowed = np.ones(self._vocab_size, bool)
        if not self._generated:
            allowed[: rules.first] = False
            if rules.latest_start is not None:
                allowed[rules.first + rules.latest_start + 1 :] = False
        elif ended:  # a start time, or the end of the transcript
            allowed[: rules.end] = False
        elif self._times_in_a_row:  # text follows a start time
            allowed[rules.first :] = False
        if latest is not None:  # the next segment may start where this one ended
            allowed[rules.first : latest + (0 if ended else 1)] = False
        return _packed(allowed)

    def accept(self, token: int) -> None:
        """Advance by the next token of the transcript."""
        self._generated += 1
        if token >= self._rules.first:
            self._latest = token
            self._times_in_a_row += 1
        else:
            self._times_in_a_row = 0


def _packed(allowed: np.ndarray) -> TokenMask:
    """Return a mask of one boolean a token, packed as `TokenMask` is."""
    words = -(-len(allowed) // 32)
    bits = np.packbits(np.pad(allowed, (0, words * 32 - len(allowed))), bitorder="little")
    return bits.view("<u4").astype(np.uint32, copy=False)
