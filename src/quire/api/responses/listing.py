"""Lists of items: their query, and their pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from quire.api.responses.items import WireEvent
from quire.api.responses.schema import Include
from quire.api.responses.stored_item import StoredItem
from quire.api.shared.pieces import Array
from quire.api.shared.schema import Wire
from quire.core.errors import NotFound


class ItemsQuery(Wire):
    """A page of items."""

    order: Literal["asc", "desc"] = Field("desc", description="desc: newest first")
    limit: int = Field(20, ge=1, le=100, strict=False)
    after: str = Field("", description="the id of the item after which the page starts")
    include: list[Include] = Field([], description="no effect: items are always listed whole")


def listed(items: Sequence[StoredItem], query: ItemsQuery) -> WireEvent:
    """Return a page of a conversation, for `pieces` to write.

    Raises:
        NotFound: `after` is none of the items.
    """
    ordered = items if query.order == "asc" else items[::-1]
    start = 0
    if query.after:
        ids = [each.id for each in ordered]
        if query.after not in ids:
            raise missing("item", query.after, "after")
        start = ids.index(query.after) + 1
    page = ordered[start : start + query.limit]
    return {
        "object": "list",
        "data": Array(page),
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": start + len(page) < len(ordered),
    }


def missing(what: str, missing_id: str, param: str) -> NotFound:
    """Return the error for a response, conversation or item that is not stored."""
    return NotFound(
        f"There is no {what} '{missing_id[:80]}' here. Only the most recently used responses and "
        "conversations are kept (--stored-responses).",
        param=param,
        code=f"{what}_not_found",
    )
