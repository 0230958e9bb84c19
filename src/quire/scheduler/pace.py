"""How many prompt tokens a step may read, so that running streams do not stall.

The time of a step is modelled as that of a step that only generates, plus a cost a prompt token.
Both are learned from the steps that ran.
"""

from __future__ import annotations

_SMOOTHING = 0.2
_MIN_CHUNK = 4
_FIRST_CHUNK = 32


class Pace:
    """Sizes prompt chunks by time.

    Args:
        step_s: seconds aimed at for a step that only reads prompts.
        stall_factor: a step that also generates aims at this many times the duration of one that
            only generates.
        max_rows: rows of a step at most.
    """

    def __init__(self, step_s: float, stall_factor: float, max_rows: int) -> None:
        self._step_s = step_s
        self._stall_factor = stall_factor
        self._max_rows = max_rows
        self._token_s: float | None = None
        self._decode_s: dict[int, float] = {}

    def prompt_budget(self, decode_rows: int) -> int:
        """Prompt tokens that the next step may read beside `decode_rows` generating rows."""
        room = self._max_rows - decode_rows
        if self._token_s is None:
            return max(0, min(room, _FIRST_CHUNK))
        seconds = self._step_s
        if decode_rows:
            seconds = min(seconds, (self._stall_factor - 1) * self._decode_estimate(decode_rows))
        return max(0, min(room, max(_MIN_CHUNK, int(seconds / self._token_s))))

    def prompt_seconds(self, tokens: int) -> float | None:
        """How long reading so many prompt tokens is likely to take; None before any were."""
        return None if self._token_s is None else tokens * self._token_s

    def observe(self, decode_rows: int, prompt_rows: int, seconds: float) -> None:
        """A step took this long."""
        if prompt_rows == 0:
            bucket = decode_rows.bit_length()
            self._decode_s[bucket] = _blend(self._decode_s.get(bucket), seconds)
        elif prompt_rows >= _MIN_CHUNK:
            base = self._decode_estimate(decode_rows) if decode_rows else 0.0
            cost = max(seconds - base, seconds * 0.1) / prompt_rows
            self._token_s = _blend(self._token_s, cost)

    def _decode_estimate(self, rows: int) -> float:
        """From the nearest number of rows seen; a guess of the step time before any was."""
        if not self._decode_s:
            return self._step_s / 4
        bucket = rows.bit_length()
        nearest = min(self._decode_s, key=lambda seen: abs(seen - bucket))
        return self._decode_s[nearest]


def _blend(old: float | None, new: float) -> float:
    """A moving average that one hiccup (a kernel being compiled) cannot throw far off."""
    if old is None:
        return new
    return old + _SMOOTHING * (min(new, 2 * old) - old)
