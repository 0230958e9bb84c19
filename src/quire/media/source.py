"""Media as a request names it, before it is fetched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from quire.core.errors import RequestError

Fineness = Literal["auto", "low", "high"]
Detail = Fineness | int
"""How finely a picture or frame is read. "low" takes the fewest tokens that the model offers,
"auto" and "high" its default number; an integer is the most tokens of one picture.
"""


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of one file.

    Attributes:
        bytes: the most bytes, as transferred.
        pixels: the most pixels of a picture or frame, before it is scaled.
        seconds: the longest sound or video, in seconds.
        frames: the most frames read of a video, spread evenly.
        pages: the most pages of a document.
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
        files: the most files, including those of earlier messages.
        each: limits of each file.
    """

    files: int
    each: FileLimits


DOCUMENT = "file"
"""The kind of PDF files. No encoder takes them: they become text and images."""

DEFAULT_LIMITS = FileLimits()


@dataclass(frozen=True, slots=True)
class MediaSource:
    """A file that a request names.

    Attributes:
        url: a `data:`, `http:`, `https:` or `file:` URL; empty if the part cannot be read.
        param: the request field that holds it, for errors.
        named: the type's name in the protocol, for errors.
        kind: the media kind, or `DOCUMENT`, whose pages become text, and images if the model sees.
        sound: whether a video's sound is read too.
    """

    url: str
    param: str
    named: str
    detail: Detail = "auto"
    kind: str = "image"
    sound: bool = False

    @property
    def remote(self) -> bool:
        """Whether the file has to be fetched over the network."""
        return self.url[:5].lower().startswith("http")


def refusal(param: str, reason: str, code: str = "invalid") -> RequestError:
    """Return the error for a file that cannot be used; `code` is the last part of the wire code."""
    return RequestError(f"'{param}' cannot be used: {reason}.", param=param, code=f"media_{code}")


def not_taken(source: MediaSource) -> RequestError:
    """Return the error for a kind of media that the model does not take, or for a document that is
    not a PDF.
    """
    why = "which the model that is served does not take"
    if source.kind == DOCUMENT:
        why = "and holds no PDF; other files, and files by their id, are not read"
    return RequestError(
        f"'{source.param}' is of type '{source.named}', {why}.",
        param=source.param,
        code="unsupported_content",
    )
