"""Notes about a request for its access log line."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

_KEY = "quire.note"


def notes(scope: Scope) -> dict[str, Any]:
    """Return the notes about the request with this `scope`."""
    details: dict[str, Any] = scope.setdefault(_KEY, {})
    return details


def note(scope: Scope, details: dict[str, Any]) -> None:
    """Add fields to the log line of the request with this `scope`."""
    notes(scope).update(details)
