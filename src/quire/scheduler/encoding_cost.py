"""Cost model of encoder work, learned from the steps that ran."""

from __future__ import annotations

from collections.abc import Iterable

from quire.scheduler.plan import EncoderWork

_SMOOTHING = 0.2
"""Weight of the newest step in a bucket's seconds per row."""
_MAX_SLOWDOWN = 2.0
"""Outlier limit: a step counts as at most this multiple of its expected time."""

_Bucket = tuple[str, int]
"""Media kind and bit length of a piece's row count: pieces of similar cost share a bucket."""


class EncodingCost:
    """Seconds per row of hidden states of an encoder piece, by media kind and piece size."""

    def __init__(self) -> None:
        self._row_s: dict[_Bucket, float] = {}

    def seconds(self, kind: str, rows: int) -> float | None:
        """Return the expected time of a piece with `rows` hidden states; None before any was seen.

        An unseen size is estimated from the nearest one of the same kind.
        """
        bits = rows.bit_length()
        seen = [size for name, size in self._row_s if name == kind]
        if not seen:
            return None
        nearest = min(seen, key=lambda size: abs(size - bits))
        return max(rows, 1) * self._row_s[kind, nearest]

    def observe(self, work: Iterable[EncoderWork], seconds: float) -> None:
        """Learn from pieces that took `seconds` together."""
        work = list(work)
        known = [self.seconds(each.item.kind, each.rows) for each in work]
        expected = sum(
            each.count * piece_s for each, piece_s in zip(work, known, strict=True) if piece_s
        )
        total = sum(each.count * max(each.rows, 1) for each in work)
        for each, piece_s in zip(work, known, strict=True):
            bucket = each.item.kind, each.rows.bit_length()
            if piece_s is None or not expected:
                self._row_s[bucket] = seconds / total
                continue
            old = piece_s / max(each.rows, 1)
            new = old * min(seconds / expected, _MAX_SLOWDOWN)
            self._row_s[bucket] = old + _SMOOTHING * (new - old)
