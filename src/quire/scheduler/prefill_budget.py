"""How many prompt tokens a step may read, so that running streams do not stall.

The time of a step is modelled as that of a step that only generates, plus a cost a chunk (its own
attention in every layer) and a cost a token. All three are learned from the steps that ran.
"""

from __future__ import annotations

import math

_SMOOTHING = 0.2
_MEMORY = 0.95
_MIN_TOKENS = 4
_FIRST_TOKENS = 32
_UNHURRIED = 4
"""Where nobody generates, a chunk's tokens cost at least so many times what the chunk itself does:
a step of few rows takes nearly as long as one of many, since it reads all weights too."""
_SMALLER = 0.7
"""Every other step reads this share of what it may: from chunks of one size nobody could tell what
a chunk costs and what a token."""
_GROWTH = 2  # from one chunk to the next, since costs are known for sizes like those seen


class PrefillBudget:
    """Sizes prompt chunks by time.

    Args:
        step_s: seconds aimed at for what a step reads of prompts, at most.
        stall_factor: a step that also generates, while one or two prompts are read, aims at this
            many times the duration of one that only generates. Each further prompt that waits adds
            as much again: those who wait for a first token count as much as those who have theirs.
        max_rows: rows of a step at most.
    """

    def __init__(self, step_s: float, stall_factor: float, max_rows: int) -> None:
        self._step_s = step_s
        self._stall_factor = stall_factor
        self._max_rows = max_rows
        self._cost = _ChunkCost()
        self._largest = _FIRST_TOKENS // _GROWTH
        self._smaller = False
        self._decode_s: dict[int, float] = {}

    def room(self, decode_rows: int) -> int:
        """Rows that a step has left beside the generating ones."""
        return max(0, self._max_rows - decode_rows)

    def seconds(self, decode_rows: int, prompts: int = 1) -> float:
        """Time for prompts and their media in the next step, beside `decode_rows` generating rows.

        Args:
            prompts: how many wait, begun or not.
        """
        if not decode_rows:
            return self._step_s
        stall = (self._stall_factor - 1) * self._decode_estimate(decode_rows)
        return min(self._step_s, max(1, prompts - 1) * stall)

    def prompt_budget(
        self, decode_rows: int, prompts: int = 1, spent_s: float = 0.0, *, sits_out: bool = False
    ) -> int:
        """Prompt tokens that the next step may read beside `decode_rows` generating rows.

        Args:
            prompts: how many wait, begun or not.
            spent_s: what encoders take of the time.
            sits_out: whether somebody who generates has no row in this step, and waits for its end.
        """
        room = self.room(decode_rows)
        chunk_s, token_s = self._cost.estimate()
        if token_s == 0:
            return min(room, _FIRST_TOKENS)
        seconds = self.seconds(decode_rows, prompts) - spent_s
        # Never so few that the chunk's own cost outweighs them: that reads slower and stalls more.
        hurried = decode_rows > 0 or sits_out
        least, worth = (_MIN_TOKENS, 1) if hurried else (_FIRST_TOKENS, _UNHURRIED)
        tokens = max((seconds - chunk_s) / token_s, worth * chunk_s / token_s, least)
        tokens = min(room, tokens, self._largest * _GROWTH)
        # Rounded up: a budget of one token must not become none, or the prompt would never end.
        return math.ceil(tokens * _SMALLER) if self._smaller else int(tokens)

    def prompt_seconds(self, tokens: int) -> float | None:
        """How long reading so many prompt tokens is likely to take; None before any were."""
        chunk_s, token_s = self._cost.estimate()
        return None if token_s == 0 else chunk_s + tokens * token_s

    def step_seconds(self, decode_rows: int, chunks: int, prompt_rows: int) -> float:
        """How long a step is likely to take; `step_s` before any was seen."""
        if not self._decode_s:
            return self._step_s
        return self.known_seconds(decode_rows, chunks, prompt_rows)

    def known_seconds(self, decode_rows: int, chunks: int, prompt_rows: int) -> float:
        """The same, of which what was never seen counts for nothing."""
        seconds = self._decode_estimate(decode_rows) if decode_rows and self._decode_s else 0.0
        if prompt_rows:
            chunk_s, token_s = self._cost.estimate()
            seconds += chunks * chunk_s + prompt_rows * token_s
        return seconds

    def observe(self, decode_rows: int, chunks: int, prompt_rows: int, seconds: float) -> None:
        """A step took this long."""
        if prompt_rows == 0:
            bucket = decode_rows.bit_length()
            self._decode_s[bucket] = _blend(self._decode_s.get(bucket), seconds)
        else:
            base = self._decode_estimate(decode_rows) if decode_rows else 0.0
            self._cost.observe(chunks, prompt_rows, max(seconds - base, seconds * 0.1))
            self._smaller = not self._smaller
            self._largest = max(prompt_rows, _FIRST_TOKENS // _GROWTH, self._largest // _GROWTH)

    def _decode_estimate(self, rows: int) -> float:
        """From the nearest number of rows seen; a guess of the step time before any was."""
        if not self._decode_s:
            return self._step_s / 4
        bucket = rows.bit_length()
        nearest = min(self._decode_s, key=lambda seen: abs(seen - bucket))
        return self._decode_s[nearest]


class _ChunkCost:
    """Least squares of `seconds = chunks * a + tokens * b`, in which old steps fade."""

    def __init__(self) -> None:
        self._cc = self._ct = self._tt = self._cs = self._ts = 0.0

    def observe(self, chunks: int, tokens: int, seconds: float) -> None:
        a, b = self.estimate()
        if b > 0:  # a hiccup (a kernel being compiled) must not throw the estimate far off
            seconds = min(seconds, 2 * (a * chunks + b * tokens))
        self._cc = _MEMORY * self._cc + chunks * chunks
        self._ct = _MEMORY * self._ct + chunks * tokens
        self._tt = _MEMORY * self._tt + tokens * tokens
        self._cs = _MEMORY * self._cs + chunks * seconds
        self._ts = _MEMORY * self._ts + tokens * seconds

    def estimate(self) -> tuple[float, float]:
        """Seconds a chunk and seconds a token; (0, 0) before anything was seen."""
        if self._tt == 0:
            return 0.0, 0.0
        alone = self._ts / self._tt  # all of the cost is the tokens'
        # Chunks of one size say nothing of how the cost divides: lean to `alone` then.
        determinant = self._cc * self._tt - self._ct**2
        if determinant < 0.01 * self._cc * self._tt:
            return 0.0, alone
        chunk = (self._cs * self._tt - self._ts * self._ct) / determinant
        chunk = min(max(chunk, 0.0), self._cs / self._cc)
        token = (self._ts - chunk * self._ct) / self._tt
        return chunk, max(token, 0.05 * alone)


def _blend(old: float | None, new: float) -> float:
    """A moving average that one hiccup cannot throw far off."""
    if old is None:
        return new
    return old + _SMOOTHING * (min(new, 2 * old) - old)
