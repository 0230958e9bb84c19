"""Limits on runs of digits and blanks in JSON, which a failing model would write for ever."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from quire.constraints.masks import TokenMask, mask_of

MAX_DIGITS = 64
"""Most digits in a row outside of strings."""
MAX_BLANKS = 256
"""Most blanks in a row within a string, escaped ones included."""

_DIGITS, _BLANKS, _ESCAPED = frozenset(b"0123456789"), frozenset(b" \t\n\r"), frozenset(b"ntr")
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


class LeadingTokens:
    """Tokens of a vocabulary by their first character. Built when a run first reaches its limit.

    Args:
        bytes_of: returns a token's bytes.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], vocab_size: int) -> None:
        self.bytes_of = bytes_of
        self._vocab_size = vocab_size

    @cached_property
    def _pieces(self) -> list[bytes]:
        return [self.bytes_of(each) for each in range(self._vocab_size)]

    @cached_property
    def no_digits(self) -> TokenMask:
        """Tokens that do not start with a digit."""
        found = (i for i, piece in enumerate(self._pieces) if piece and piece[0] in _DIGITS)
        return ~mask_of(found, self._vocab_size)

    @cached_property
    def no_blanks(self) -> TokenMask:
        """Tokens that do not start with a blank, escaped or not."""
        found = (
            i
            for i, piece in enumerate(self._pieces)
            if piece
            and (piece[0] in _BLANKS or (piece[:1] == b"\\" and piece[1:2] in (b"n", b"t", b"r")))
        )
        return ~mask_of(found, self._vocab_size)


class RunLimit:
    """Follows the JSON of one constrained answer.

    Args:
        tokens: tokens of the model's vocabulary.
    """

    def __init__(self, tokens: LeadingTokens) -> None:
        self._tokens = tokens
        self._in_string = self._escaped = False
        self._run = 0

    def accept(self, token: int) -> None:
        """Advance by the next token."""
        for byte in self._tokens.bytes_of(token):
            if self._escaped:
                self._escaped = False
                self._run = self._run + 1 if byte in _ESCAPED else 0
            elif byte == _QUOTE:
                self._in_string, self._run = not self._in_string, 0
            elif self._in_string and byte == _BACKSLASH:
                self._escaped = True
            else:
                kind = _BLANKS if self._in_string else _DIGITS
                self._run = self._run + 1 if byte in kind else 0

    def limited(self, mask: TokenMask) -> TokenMask:
        """Return the mask without tokens that lengthen a run at its limit, if others are left."""
        if self._run < (MAX_BLANKS if self._in_string else MAX_DIGITS):
            return mask
        allowed = self._tokens.no_blanks if self._in_string else self._tokens.no_digits
        shorter: TokenMask = np.bitwise_and(mask, allowed)
        return shorter if shorter.any() else mask
