"""Finds earlier occurrences of a text's last tokens, in the same or in another text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SHORTEST = 3
"""Fewest tokens that must agree."""
LONGEST = 32
"""Most tokens that are compared, to tell likely continuations from chance."""
_CANDIDATES = 6
"""Number of latest occurrences that are compared with the end of the text."""
_WIDTH = 21
"""Bits per token id in a key; three ids fit into 63 bits."""
_MASK = (1 << SHORTEST * _WIDTH) - 1
"""The bits of a key."""


class Place(NamedTuple):
    """An earlier occurrence of a text's last tokens.

    Attributes:
        end: index of the token that follows the occurrence.
        agreed: number of agreeing tokens before it, at most `LONGEST`.
    """

    end: int
    agreed: int


class FixedText:
    """The index of a text that does not change.

    Args:
        tokens: a copy is kept.
    """

    def __init__(self, tokens: Sequence[int] | array[int]) -> None:
        self.tokens = array("i", tokens)
        ids = np.array(self.tokens, dtype=np.int64)
        keys = (ids[:-2] << 2 * _WIDTH) | (ids[1:-1] << _WIDTH) | ids[2:]
        order = np.argsort(keys, kind="stable")
        self._keys: npt.NDArray[np.int64] = keys[order]
        self._ends: npt.NDArray[np.int32] = (order + SHORTEST).astype(np.int32)

    def find(self, text: array[int]) -> Place | None:
        """Return the longest occurrence of the end of `text` that is followed by tokens."""
        if len(text) < SHORTEST:
            return None
        key = _key(text)
        first = int(self._keys.searchsorted(key))
        if first == len(self._keys) or self._keys[first] != key:
            return None
        last = int(self._keys.searchsorted(key, side="right"))
        ends = self._ends[max(first, last - _CANDIDATES) : last].tolist()
        return _longest(
            self.tokens, text, (end for end in reversed(ends) if end < len(self.tokens))
        )


class GrowingText:
    """The index of a text that grows at its end and is searched for its own end.

    Args:
        start: index of the first token to index.
    """

    def __init__(self, start: int) -> None:
        self._next = start + SHORTEST
        """End of the next n-gram to enter."""
        self._ends: dict[int, list[int]] = {}

    def find(self, text: array[int]) -> Place | None:
        """Index the new tokens of `text`; return the longest earlier occurrence of its end."""
        if len(text) < SHORTEST:
            return None
        known, first = self._ends, self._next
        if first < len(text):
            key = _key(text, first - 1)
            for end, token in enumerate(text[first - 1 : -1], first):
                key = (key << _WIDTH | token) & _MASK
                ends = known.get(key)
                if ends is None:
                    known[key] = [end]
                    continue
                ends.append(end)
                if len(ends) > _CANDIDATES:
                    del ends[0]
            self._next = len(text)
        found = known.get(_key(text))
        # A text that was cut back has places behind its end.
        return _longest(text, text, (end for end in reversed(found or ()) if end < len(text)))


def continuation(tokens: array[int], end: int, count: int, *, repeats: bool) -> tuple[int, ...]:
    """Return the tokens from `end` on, at most `count`.

    Args:
        repeats: whether the part from `end` to the text's end repeats for ever.
    """
    found = tuple(tokens[end : end + count])
    if repeats and 0 < len(found) < count:
        return (found * -(-count // len(found)))[:count]
    return found


def _key(text: array[int], end: int | None = None) -> int:
    end = len(text) if end is None else end
    return text[end - 3] << 2 * _WIDTH | text[end - 2] << _WIDTH | text[end - 1]


def _longest(tokens: array[int], text: array[int], ends: Iterable[int]) -> Place | None:
    """Return the longest occurrence of the end of `text`; of equal ones the first."""
    best = None
    for end in ends:
        agreed = SHORTEST
        most = min(LONGEST, end, len(text))
        while agreed < most and tokens[end - agreed - 1] == text[-agreed - 1]:
            agreed += 1
        if best is None or agreed > best.agreed:
            best = Place(end, agreed)
        if agreed == LONGEST:
            break
    return best
