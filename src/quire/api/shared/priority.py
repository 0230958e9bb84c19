"""The priority of a request: a field of every protocol, and a header."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from quire.api.shared.numbers import Integer
from quire.core.errors import RequestError

PRIORITY_HEADER = "x-quire-priority"
"""Request header for clients that cannot change bodies. A body can only lower the priority
further.
"""
_MOST = 2**31

Priority = Annotated[
    Integer,
    Field(
        ge=-_MOST,
        lt=_MOST,
        description="lower numbers are scheduled first; default: 0; negative numbers overtake only "
        "requests of the same API key",
    ),
]


def priority_of(asked: int | None, headers: Mapping[str, str]) -> int | None:
    """Return a request's priority, at least that of the header.

    Raises:
        RequestError: the header is not a whole number.
    """
    given = headers.get(PRIORITY_HEADER)
    if given is None:
        return asked
    try:
        least = int(given)
    except ValueError:
        least = _MOST
    if abs(least) >= _MOST:
        raise RequestError(
            f"'{PRIORITY_HEADER}' must be a whole number such as 1.", param=PRIORITY_HEADER
        )
    return least if asked is None else max(asked, least)
