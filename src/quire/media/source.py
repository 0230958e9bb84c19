"""Media as a request names them, before anything is fetched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from quire.core.errors import RequestError

Fineness = Literal["auto", "low", "high"]
Detail = Fineness | int
"""How finely a picture or frame is read: "low" takes as few tokens as the model offers, the others
its own number; or the most tokens that one may take."""


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of one file.

    Attributes:
        bytes: as it goes over the wire.
        pixels: width times height of a picture or of a video's frame, before it is scaled.
        seconds: of sound or video.
        frames: of a video that are looked at; a processor that would look at more spreads these
            evenly.
        pages: of a document.
    """

    bytes: int = 20 << 20
    pixels: int = 50_000_000
    seconds: float = math.inf
    frames: int = 256
    pages: int = 100


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of one kind of media in a request.

    Attributes:
        files: earlier messages' included.
        each: of them.
    """

    files: int
    each: FileLimits


DOCUMENT = "file"
"""The kind of PDF files. No encoder takes them: they become texts and images."""

DEFAULT_LIMITS = FileLimits()


@dataclass(frozen=True, slots=True)
class MediaSource:
    """The source of a file.

    Attributes:
        url: `data:`, `http:`, `https:` or `file:`; empty for what cannot be read in any way.
        param: the request field that holds it, for errors.
        named: what the protocol calls its type, for errors.
        kind: of media, or `DOCUMENT`: its pages, as text and as images where the model sees.
        sound: a video is heard, too.
    """

    url: str
    param: str
    named: str
    detail: Detail = "auto"
    kind: str = "image"
    sound: bool = False

    @property
    def remote(self) -> bool:
        """Whether another machine has to be asked for it."""
        return self.url[:5].lower().startswith("http")


def refusal(param: str, reason: str, code: str = "invalid") -> RequestError:
    """Return the error for a file that cannot be used; `code` is the end of the wire code."""
    return RequestError(f"'{param}' cannot be used: {reason}.", param=param, code=f"media_{code}")


def not_taken(source: MediaSource) -> RequestError:
    """Return the refusal of a kind of media that the served model does not take, or of no PDF."""
    why = "which the model that is served does not take"
    if source.kind == DOCUMENT:
        why = "and holds no PDF; other files, and files by their id, are not read"
    return RequestError(
        f"'{source.param}' is of type '{source.named}', {why}.",
        param=source.param,
        code="unsupported_content",
    )
