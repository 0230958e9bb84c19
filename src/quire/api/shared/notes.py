"""Notes about a request for its access log line."""

from __future__ import annotations

from typing import TypedDict, cast

from starlette.types import Scope

from quire.serving.streams import RunSummary

_KEY = "quire.note"


class LoggedError(TypedDict):
    """The error that a request was answered with. The message may be cut."""

    type: str
    message: str


class Notes(RunSummary, total=False):
    """Fields of a request's log line that become known while it is handled.

    Attributes:
        model: name of the model or adapter that answers.
        ignored_fields: paths of the request's fields without effect.
        dropped_thoughts: number of reasoning blocks that the prompt leaves out.
    """

    model: str
    error: LoggedError
    ignored_fields: list[str]
    dropped_thoughts: int


class LogLine(Notes):
    """All fields of a finished request's log line.

    Attributes:
        ms: milliseconds from the first byte of the request to the last of the answer.
    """

    id: str
    method: str
    path: str
    status: int
    ms: float


def notes(scope: Scope) -> Notes:
    """Return the notes about the request with this `scope`."""
    details: Notes = scope.setdefault(_KEY, {})
    return details


def note(scope: Scope, details: Notes | RunSummary) -> None:
    """Add fields to the log line of the request with this `scope`."""
    cast("dict[str, object]", notes(scope)).update(details)
