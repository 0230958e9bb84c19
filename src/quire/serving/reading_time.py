"""Estimates how much longer the reading of a prompt takes."""

from __future__ import annotations

_MEMORY = 0.98
"""Factor of the weight of earlier measurements after each new chunk, because prompts change."""
_LEAST_S = 1.0
_LEAST_CHUNKS = 6
_TOLD_APART = 1e-3
"""Least relative variance of positions that allows a slope to be estimated."""


class ReadingTime:
    """Fits `a + b * position` seconds a token to the chunks of one prompt.

    A token attends to all before it, so the last tokens of a long prompt take several times as long
    as the first. Neither `a` nor `b` is negative.
    """

    def __init__(self) -> None:
        self._started: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._chunks = 0
        self._tokens = self._places = self._squares = self._seconds = self._moments = 0.0

    def observe(self, done: int, at_s: float) -> None:
        """Record that `done` tokens are read at a time in seconds.

        The tokens of the first call were read at an unknown time. Tokens lost by preemption are
        read again.
        """
        if self._last is None or done <= self._last[0]:
            self._started = self._started or (done, at_s)
            self._last = (done, at_s)
            return
        before, before_s = self._last
        tokens, seconds, place = done - before, at_s - before_s, (before + done) / 2
        self._tokens = _MEMORY * self._tokens + tokens
        self._places = _MEMORY * self._places + tokens * place
        self._squares = _MEMORY * self._squares + tokens * place**2
        self._seconds = _MEMORY * self._seconds + seconds
        self._moments = _MEMORY * self._moments + seconds * place
        self._chunks += 1
        self._last = (done, at_s)

    def left_s(self, total: int) -> float | None:
        """Return the seconds until a prompt of `total` tokens is read; None before there is an
        estimate.
        """
        if self._started is None or self._last is None or self._chunks < _LEAST_CHUNKS:
            return None
        done, at_s = self._last
        if at_s - self._started[1] < _LEAST_S:
            return None
        token_s, place_s = self._costs()
        return max(0, total - done) * (token_s + place_s * (done + total) / 2)

    def _costs(self) -> tuple[float, float]:
        """Return the seconds of a token at position 0, and what each position adds."""
        apart = self._tokens * self._squares - self._places**2
        if apart <= _TOLD_APART * self._tokens * self._squares:
            return self._seconds / self._tokens, 0.0
        place_s = (self._tokens * self._moments - self._places * self._seconds) / apart
        if place_s <= 0:
            return self._seconds / self._tokens, 0.0
        token_s = (self._seconds - place_s * self._places) / self._tokens
        return (token_s, place_s) if token_s >= 0 else (0.0, self._moments / self._squares)
