"""The layouts of rows that products read."""

from __future__ import annotations

from enum import Enum


class RowLayout(Enum):
    """A layout in which some products read rows faster than plain ones in bfloat16. Its value names
    the file in `sources/` that defines it.
    """

    DIGITS = "digits"
    INTERLEAVED = "interleaved"

    @property
    def bytes(self) -> int:
        """Bytes of 64 elements of a row."""
        return {RowLayout.DIGITS: 160, RowLayout.INTERLEAVED: 128}[self]
