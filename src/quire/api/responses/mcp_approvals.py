"""MCP items of the conversation that a response continues: listings, and approvals of calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from quire.api.responses.schema import ResponsesRequest
from quire.api.responses.store import ResponseStore
from quire.api.responses.stored_item import StoredItem
from quire.api.shared.mcp_asked import JsonBody, Target
from quire.api.shared.mcp_calls import function_name
from quire.api.shared.schema import parse

_KINDS = ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call")


def _earlier(fields: JsonBody, store: ResponseStore) -> Sequence[StoredItem] | None:
    """Return the stored items that a request continues; None if they are not stored."""
    previous, named = fields.get("previous_response_id"), _conversation_id(fields)
    if isinstance(previous, str):
        return None if named is not None else store.history(previous)  # both are refused
    return () if named is None else store.conversation(named)


def _conversation_id(fields: JsonBody) -> str | None:
    """Return the id of the conversation that a request names, if any."""
    named = fields.get("conversation")
    found = named.get("id") if isinstance(named, Mapping) else named
    return found if isinstance(found, str) else None


def _read(item: StoredItem) -> JsonBody:
    """Return a stored item as a request has it."""
    return {**json.loads(item.written), "id": item.id}


class Approvals:
    """Approvals of MCP calls, and other MCP items, in a response's conversation.

    Attributes:
        items: the request's own items.
        earlier: ids of the stored items that the request continues.
        conversation: id of the conversation that the request names.
    """

    def __init__(
        self, fields: JsonBody, targets: Mapping[str, Target], store: ResponseStore
    ) -> None:
        said = fields.get("input")
        given = [{"role": "user", "content": said}] if isinstance(said, str) else said
        self.items: list[Any] = given if isinstance(given, list) else []
        self._fields = fields
        self._targets = targets
        kept = _earlier(fields, store)
        self._known = kept is not None
        self._earlier = kept or ()
        self.earlier = {each.id for each in self._earlier}
        self.conversation = _conversation_id(fields)
        mcp = [_read(each) for each in self._earlier if each.kind in _KINDS]
        self._conversation: list[Any] = [*mcp, *self.items]

    def request(self) -> JsonBody:
        """Return the fields by which the first round is asked. It is always stored, for the whole
        response to take its place, and joins no conversation, which it reads as input instead.
        """
        if self.conversation is None or not self._known:
            return {"input": self.items, "store": True}
        items = [*map(_read, self._earlier), *self.items]
        return {"input": items, "store": True, "conversation": None}

    def _of_kind(self, kind: str) -> list[JsonBody]:
        return [
            each
            for each in self._conversation
            if isinstance(each, dict) and each.get("type") == kind
        ]

    def listed(self) -> list[JsonBody]:
        """Return an item for each server whose tools the conversation does not list yet."""
        known = {each.get("server_label") for each in self._of_kind("mcp_list_tools")}
        labels = dict.fromkeys(each.server for each in self._targets.values())
        return [
            {
                "id": f"mcpl_{uuid.uuid4().hex}",
                "type": "mcp_list_tools",
                "server_label": label,
                "tools": [
                    {
                        "name": each.tool.name,
                        "description": each.tool.description,
                        "input_schema": each.tool.parameters,
                        "annotations": {"read_only": each.tool.read_only},
                    }
                    for each in self._targets.values()
                    if each.server == label
                ],
                "error": None,
            }
            for label in labels
            if label not in known
        ]

    def approved(self) -> list[tuple[JsonBody, Target]]:
        """Return the calls that the request approves, none of which was made before.

        Raises:
            RequestError: the request is wrong, so that nothing may be called for it.
        """
        made = {each.get("approval_request_id") for each in self._of_kind("mcp_call")}
        granted = {
            each.get("approval_request_id")
            for each in self._of_kind("mcp_approval_response")
            if each.get("approve") is True
        }
        waiting = {
            each["id"]: each
            for each in self._of_kind("mcp_approval_request")
            if each.get("id") in granted - made and isinstance(each.get("arguments"), str)
        }
        if not waiting or not self._known:
            return []
        parse(ResponsesRequest, self._fields, strict_fields=False)
        found = []
        for request in waiting.values():
            name = function_name(str(request.get("server_label")), str(request.get("name")))
            if name in self._targets:
                found.append((request, self._targets[name]))
        return found
