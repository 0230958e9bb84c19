"""The parts of files that processors made, as requests hold them. Imports no decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.core.media import MediaItem
from quire.media.source import Detail

FileKey = tuple[str, bytes, Detail, bool]
"""Cache key of a file: kind, digest, detail, and whether a video's sound was read."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One item of a file, with text around it. A video may become one item per frame, with its
    time.

    Attributes:
        before, after: text around the item's placeholders, as in the chat template. It may hold
            control tokens.
    """

    item: MediaItem
    before: str = ""
    after: str = ""


Parts = tuple[MediaPart, ...]
"""The parts of a file, in order; at least one."""


class PartStore(Protocol):
    """A cache of prepared files."""

    def get(self, key: FileKey) -> Parts | None: ...

    def put(self, key: FileKey, value: Parts) -> Parts:
        """Store the parts. Return the stored ones, which may be an equal earlier value."""
        ...
