"""Finds markers in text, for vocabularies in which they are not single tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable


class MarkerScanner:
    """Splits a stream of text into runs and markers. The result does not depend on how it is cut.

    Text that may start a marker is held until that is decided. No marker may be a prefix of
    another.
    """

    __slots__ = ("_firsts", "_held", "_longest", "_pattern", "_prefixes")

    def __init__(self, markers: Iterable[str]) -> None:
        known = sorted(markers)
        self._pattern = re.compile("|".join(map(re.escape, known))) if known else None
        self._firsts = frozenset(marker[0] for marker in known)
        self._prefixes = frozenset(m[:end] for m in known for end in range(1, len(m)))
        self._longest = max(map(len, known), default=1) - 1
        self._held = ""

    def ignores(self, piece: str) -> bool:
        """Return whether `piece` can be passed on unchanged, without `feed`."""
        return not self._held and self._firsts.isdisjoint(piece)

    def feed(self, piece: str) -> list[tuple[str, bool]]:
        """Return the decided runs of text (False) and markers (True), in order, none empty."""
        if self._pattern is None:
            return [(piece, False)] if piece else []
        text = self._held + piece
        parts: list[tuple[str, bool]] = []
        at = 0
        for match in self._pattern.finditer(text):
            if match.start() > at:
                parts.append((text[at : match.start()], False))
            parts.append((match.group(), True))
            at = match.end()
        keep = self._start_of(text, at)
        if keep > at:
            parts.append((text[at:keep], False))
        self._held = text[keep:]
        return parts

    def _start_of(self, text: str, at: int) -> int:
        """Return the offset of the longest suffix of `text[at:]` that may start a marker, or the
        text's length.
        """
        for start in range(max(at, len(text) - self._longest), len(text)):
            if text[start] in self._firsts and text[start:] in self._prefixes:
                return start
        return len(text)

    def flush(self) -> str:
        """Return the held text, which cannot become a marker any more."""
        held, self._held = self._held, ""
        return held
