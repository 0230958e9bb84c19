"""Requests that concern no model: small bodies, parameters of URLs, and pages of lists."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol, TypeVar, get_origin

from starlette.requests import Request

from quire.api.shared.access import note_ignored
from quire.api.shared.context import ServerContext
from quire.api.shared.json_text import parse_json
from quire.api.shared.limits import check_headers, read_body
from quire.api.shared.schema import Wire, parse
from quire.core.errors import NotFound


class Listed(Protocol):
    """An entry of a list."""

    @property
    def id(self) -> str: ...


Kept = TypeVar("Kept", bound=Listed)
Fields = TypeVar("Fields", bound=Wire)


async def read_fields(server: ServerContext, request: Request, schema: type[Fields]) -> Fields:
    """Return a validated body that concerns no model."""
    check_headers(request)
    with server.slots.bodies.reading() as counted:
        body = await read_body(request, server.config.max_body_bytes, counted)
    fields, unknown = parse(schema, parse_json(body), strict_fields=server.config.strict_fields)
    note_ignored(request.scope, unknown)
    return fields


def read_query(request: Request, schema: type[Fields], *, beside: Collection[str] = ()) -> Fields:
    """Return a URL's parameters, validated.

    Args:
        beside: parameters that the endpoint reads itself.

    Raises:
        RequestError: a parameter has a value that is not allowed.
    """
    given = {
        name: value for name, value in _parameters(request, schema).items() if name not in beside
    }
    query, unknown = parse(schema, given, strict_fields=False)
    note_ignored(request.scope, unknown)
    return query


def _parameters(request: Request, schema: type[Wire]) -> Mapping[str, object]:
    """Return the query's parameters: the last value of each, or all values of a list."""
    given: dict[str, object] = {}
    for key in request.query_params:
        name, values = key.removesuffix("[]"), request.query_params.getlist(key)
        field = schema.model_fields.get(name)
        is_list = field is not None and get_origin(field.annotation) is list
        given[name] = values if is_list else values[-1]
    return given


def page(records: Iterable[Kept], after: str, limit: int) -> tuple[list[Kept], bool]:
    """Return the records after `after`, and whether there are more.

    Raises:
        NotFound: `after` is not one of them.
    """
    listed = list(records)
    if after:
        ids = [each.id for each in listed]
        if after not in ids:
            raise NotFound(f"There is no '{after[:80]}' here.", param="after", code="not_found")
        listed = listed[ids.index(after) + 1 :]
    return listed[:limit], len(listed) > limit
