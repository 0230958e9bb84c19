"""Finds answers that have fallen into a loop: the same cycle of tokens again and again.

Detection is exact: a loop is reported only if each token of the tail equals the one a cycle before,
and in the step in which the last missing token arrives. Pure Python.

How: a tail that repeats a cycle of `n` tokens at least three times holds, for each length `k` from
`n` to `2 * n`, the same `k` tokens twice, `n` apart. And since `k >= n`, the nearest earlier
occurrence is exactly one cycle back, not some shorter likeness within the cycle. So it is enough to
remember where the last `k` tokens were seen before, for each power of two `k`, by a rolling hash:
constant work a token and power, about ten powers. A hash may lie, so a find is compared
token by token before it is reported.
"""

from __future__ import annotations

from collections import deque

from quire.core.sampling_params import MIN_REPEATS

_BOUND_REPEATS, _BOUND_TOKENS = 32, 512
"""Default repeats and tokens from which a grammar-constrained answer counts as a loop."""

_MODULUS = (1 << 61) - 1
_BASE = 0x1B873593CC9E2D51 % _MODULUS


def loop_detector(repeats: int | None, *, bound: bool) -> LoopDetector | None:
    """Return the loop detector of one answer; None if it is not watched.

    Args:
        repeats: as was asked for, 0 for never; None is the default: only bound answers are watched.
        bound: whether a grammar holds the whole answer, so that the model cannot end it at will.
    """
    if repeats is None:
        return LoopDetector(_BOUND_REPEATS, _BOUND_TOKENS) if bound else None
    return LoopDetector(repeats) if repeats else None


class LoopDetector:
    """Detects loops in one answer.

    Args:
        repeats: how often a cycle must follow on itself, at least `MIN_REPEATS`.
        min_tokens: how many tokens all repeats must have together. It lets short natural repeats
            pass: a ruler of dashes, blank lines, a row of zeros.
        max_cycle: the longest cycle looked for, in tokens.

    Raises:
        ValueError: `repeats` is too small.
    """

    def __init__(self, repeats: int, min_tokens: int = 128, max_cycle: int = 1024) -> None:
        if repeats < MIN_REPEATS:
            raise ValueError(f"a loop is at least {MIN_REPEATS} repeats, not {repeats}")
        self._repeats = repeats
        self._min_tokens = min_tokens
        self._max_cycle = max_cycle
        self._tokens: list[int] = []
        self._scales = [_Scale(1)]
        while self._scales[-1].length < max_cycle:
            self._scales.append(_Scale(2 * self._scales[-1].length))

    def push(self, token: int) -> int | None:
        """Add a token; return the cycle's length if the tail is now a loop, else None."""
        self._tokens.append(token)
        for scale in self._scales:
            scale.push(self._tokens)
        return next((s.distance for s in self._scales if self._is_loop(s.distance, s.run)), None)

    def _is_loop(self, cycle: int, run: int) -> bool:
        length = max(self._repeats * cycle, self._min_tokens)
        if not 0 < cycle <= self._max_cycle or run + cycle < length:
            return False
        tail = self._tokens[-length:]
        return tail[cycle:] == tail[:-cycle]


class _Scale:
    """The nearest earlier occurrence of the last `length` tokens.

    Attributes:
        distance: how far back it is, if that is from `length / 2` (which is the part of the next
            smaller scale) to `length`; else 0.
        run: how many tokens up to the last equal those `distance` before, as far as was watched.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.distance = 0
        self.run = 0
        self._top = pow(_BASE, length, _MODULUS)
        self._hash = 0
        self._seen: dict[int, int] = {}
        self._order: deque[int] = deque()

    def push(self, tokens: list[int]) -> None:
        """Update with the last of `tokens`."""
        count = len(tokens)
        # One more than the token, or runs of token 0 would hash like nothing.
        self._hash = (self._hash * _BASE + tokens[-1] + 1) % _MODULUS
        if count > self.length:
            leaving = tokens[-self.length - 1] + 1
            self._hash = (self._hash - leaving * self._top) % _MODULUS
        if count < self.length:
            return
        distance = count - self._seen.get(self._hash, -self.length)
        if not self.length < 2 * distance <= 2 * self.length:
            self.distance = 0
        elif distance == self.distance:
            self.run += 1
        else:
            self.distance, self.run = distance, self.length
        self._remember(count)

    def _remember(self, count: int) -> None:
        """Store where the last tokens end, and drop entries further back than `length`."""
        self._seen[self._hash] = count
        self._order.append(self._hash)
        if len(self._order) > self.length:
            old = self._order.popleft()
            if self._seen[old] == count - self.length:
                del self._seen[old]
