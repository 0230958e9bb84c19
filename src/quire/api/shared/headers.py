"""The headers of a request, for the many places that look one up."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Scope

_KEPT = "quire.headers"


def headers_of(scope: Scope) -> Mapping[str, str]:
    """Return a request's headers by their names in lower case; of repeated ones the first.

    Starlette's `Headers` search the whole list each time, and most of what a request is asked for
    is not in it. They also replace the scope's list, after which headers are read anew here.
    """
    sent = scope["headers"]
    kept: tuple[object, dict[str, str]] | None = scope.get(_KEPT)
    if kept is not None and kept[0] is sent:
        return kept[1]
    named = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(sent)}
    scope[_KEPT] = sent, named
    return named
