"""Finds markers in text, for vocabularies in which they are not single tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class SpelledMarkers:
    """Markers that are found in text, which scanners share. None may be a prefix of another.

    Attributes:
        pattern: matches any of them; None if there are none.
        firsts: their first characters.
        prefixes: what they can begin with, apart from themselves.
        longest: characters of the longest of these.
    """

    __slots__ = ("firsts", "longest", "pattern", "prefixes")

    def __init__(self, markers: Iterable[str]) -> None:
        known = sorted(markers)
        self.pattern = re.compile("|".join(map(re.escape, known))) if known else None
        self.firsts = frozenset(marker[0] for marker in known)
        self.prefixes = frozenset(m[:end] for m in known for end in range(1, len(m)))
        self.longest = max(map(len, known), default=1) - 1


@dataclass(frozen=True, slots=True)
class Marks:
    """How a vocabulary spells a dialect's markers.

    Attributes:
        ids: markers that are added tokens, by id.
        parts: parts of markers that are added tokens, by id.
        owned: the ids of both.
        spelled: markers that are found in text.
    """

    ids: Mapping[int, str]
    parts: Mapping[int, str]
    owned: frozenset[int]
    spelled: SpelledMarkers

    @classmethod
    def of(cls, markers: Iterable[str], parts: Iterable[str], added: Mapping[str, int]) -> Marks:
        """Return the marks of a vocabulary with these added tokens, ids by text."""
        known = frozenset(markers)
        ids = {added[marker]: marker for marker in known & added.keys()}
        of_parts = {added[part]: part for part in parts if part in added}
        spelled = SpelledMarkers(known - added.keys())
        return cls(ids, of_parts, frozenset(ids.keys() | of_parts.keys()), spelled=spelled)


class MarkerScanner:
    """Splits a stream of text into runs and markers. The result does not depend on how it is cut.

    Text that may start a marker is held until that is decided.
    """

    __slots__ = ("_firsts", "_held", "_markers")

    def __init__(self, markers: SpelledMarkers) -> None:
        self._markers = markers
        self._firsts = markers.firsts
        self._held = ""

    def ignores(self, piece: str) -> bool:
        """Return whether `piece` can be passed on unchanged, without `feed`."""
        return not self._held and self._firsts.isdisjoint(piece)

    def feed(self, piece: str) -> list[tuple[str, bool]]:
        """Return the decided runs of text (False) and markers (True), in order, none empty."""
        pattern = self._markers.pattern
        if pattern is None:
            return [(piece, False)] if piece else []
        text = self._held + piece
        parts: list[tuple[str, bool]] = []
        at = 0
        for match in pattern.finditer(text):
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
        for start in range(max(at, len(text) - self._markers.longest), len(text)):
            if text[start] in self._firsts and text[start:] in self._markers.prefixes:
                return start
        return len(text)

    def flush(self) -> str:
        """Return the held text, which cannot become a marker any more."""
        held, self._held = self._held, ""
        return held
