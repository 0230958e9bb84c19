"""Tokens that a request allows or bans, in addition to other constraints."""

from __future__ import annotations

from collections import deque
from copy import copy

from quire.constraints.masks import TokenMask, mask_of
from quire.constraints.timestamps import TimestampState
from quire.core.request import TokenRules


class TokenRulesState:
    """The state of one answer's token rules.

    Args:
        rules: which tokens may come; its ids are below `vocab_size`.
    """

    def __init__(self, rules: TokenRules, vocab_size: int) -> None:
        singles = [each[0] for each in rules.banned if len(each) == 1]
        everywhere = ~mask_of(singles, vocab_size)
        if rules.allowed:
            everywhere &= mask_of(rules.allowed, vocab_size)
        self._everywhere = everywhere
        self._vocab_size = vocab_size
        self._last: dict[tuple[int, ...], list[int]] = {}
        for *before, last in rules.banned:
            if before:
                self._last.setdefault(tuple(before), []).append(last)
        self._lengths = sorted({len(before) for before in self._last})
        self._tail: deque[int] = deque(maxlen=max(self._lengths, default=0))
        self._first = ~mask_of(rules.not_first, vocab_size) if rules.not_first else None
        """Applies to the next token; None after the first."""
        timestamps = rules.timestamps
        self._times = None if timestamps is None else TimestampState(timestamps, vocab_size)

    def copy(self) -> TokenRulesState:
        """Return an independent copy of the state."""
        other = copy(self)
        other._tail = self._tail.copy()
        other._times = None if self._times is None else self._times.copy()
        return other

    def mask(self) -> TokenMask:
        """Return the mask of tokens that may come next."""
        tail = tuple(self._tail)
        banned = [
            token
            for length in self._lengths
            if length <= len(tail)
            for token in self._last.get(tail[-length:], ())
        ]
        mask = self._everywhere
        if banned:
            mask = mask & ~mask_of(banned, self._vocab_size)
        if self._first is not None:
            mask = mask & self._first
        return mask if self._times is None else mask & self._times.mask()

    def accept(self, token: int) -> None:
        """Advance by the next token of the answer."""
        self._tail.append(token)
        self._first = None
        if self._times is not None:
            self._times.accept(token)
