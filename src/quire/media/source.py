"""Media as a request names them, before anything is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.core.errors import RequestError

Detail = Literal["auto", "low", "high"]


@dataclass(frozen=True, slots=True)
class MediaSource:
    """Where an item is.

    Attributes:
        url: `data:`, `http:`, `https:` or `file:`.
        param: the request field that holds it, for errors.
        named: what the protocol calls its type, for errors.
        detail: of images: "low" takes as few tokens as the model offers; the others its own number.
        kind: of media.
    """

    url: str
    param: str
    named: str
    detail: Detail = "auto"
    kind: str = "image"

    @property
    def remote(self) -> bool:
        """Whether another machine has to be asked for it."""
        return self.url[:5].lower().startswith("http")


def refusal(param: str, reason: str, code: str = "invalid") -> RequestError:
    """The error for an item that cannot be used; `code` is the end of the wire code."""
    return RequestError(f"'{param}' cannot be used: {reason}.", param=param, code=f"media_{code}")


def not_taken(named: str, param: str) -> RequestError:
    """The refusal of a kind of media that the served model does not take."""
    return RequestError(
        f"'{param}' is of type '{named}', which the model that is served does not take.",
        param=param,
        code="unsupported_content",
    )
