"""OpenAI's `/v1/conversations`: items that outlive a response, and that responses continue.

The schema is https://platform.openai.com/docs/api-reference/conversations.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.api.responses.addition import new_items
from quire.api.responses.items import WireEvent
from quire.api.responses.listing import ItemsQuery, listed, missing
from quire.api.responses.schema import Item
from quire.api.responses.store import CallerStores, Conversation, ResponseStore
from quire.api.responses.stored_item import StoredItem
from quire.api.shared.context import Context, ServerContext
from quire.api.shared.pieces import pieces, whole
from quire.api.shared.queries import read_fields, read_query
from quire.api.shared.schema import Wire

_MOST_ITEMS = 20
"""Items of one request: OpenAI's limit."""
_ADDED = ItemsQuery.model_validate({"order": "asc", "limit": _MOST_ITEMS})
Metadata = Annotated[dict[str, str], Field(max_length=16)]


class ConversationFields(Wire):
    """A new conversation."""

    items: list[Item] | None = Field(default=None, max_length=_MOST_ITEMS)
    metadata: Metadata | None = None


class ConversationUpdate(Wire):
    """The metadata that a conversation has from now on."""

    metadata: Metadata | None


class ItemsFields(Wire):
    """Items that join a conversation."""

    items: list[Item] = Field(min_length=1, max_length=_MOST_ITEMS)


async def _read_new(
    context: Context, request: Request, body: bytes
) -> tuple[list[StoredItem], Mapping[str, str]]:
    fields = context.parse(request, body, ConversationFields)
    return new_items(fields.items, context.stored(request), set()), fields.metadata or {}


async def _read_items(context: Context, request: Request, body: bytes) -> list[StoredItem]:
    fields = context.parse(request, body, ItemsFields)
    return new_items(fields.items, context.stored(request), set())


class Conversations:
    """The endpoints of conversations."""

    def __init__(self, server: ServerContext, stores: CallerStores) -> None:
        self._server = server
        self._stores = stores

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/conversations`."""
        store = self._stores.of(request)
        _, (items, metadata) = await self._server.read(request, _read_new, store.answers)
        conversation_id = f"conv_{uuid.uuid4().hex}"
        conversation = Conversation(int(time.time()), metadata, tuple(items))
        store.put_conversation(conversation_id, conversation)
        return _told(conversation_id, conversation)

    async def retrieve(self, request: Request) -> Response:
        """Answer `GET /v1/conversations/{id}`."""
        _, conversation_id, conversation = self._found(request)
        return _told(conversation_id, conversation)

    async def update(self, request: Request) -> Response:
        """Answer `POST /v1/conversations/{id}`, which replaces the metadata."""
        fields = await read_fields(self._server, request, ConversationUpdate)
        store, conversation_id, conversation = self._found(request)
        conversation = replace(conversation, metadata=fields.metadata or {})
        store.put_conversation(conversation_id, conversation)
        return _told(conversation_id, conversation)

    async def delete(self, request: Request) -> Response:
        """Answer `DELETE /v1/conversations/{id}`. Its responses stay."""
        store, conversation_id, _ = self._found(request)
        store.remove_conversation(conversation_id)
        deleted = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
        return JSONResponse(deleted)

    async def items(self, request: Request) -> Response:
        """Answer `GET /v1/conversations/{id}/items`."""
        _, _, conversation = self._found(request)
        return await whole(pieces(listed(conversation.items, read_query(request, ItemsQuery))))

    async def add_items(self, request: Request) -> Response:
        """Answer `POST /v1/conversations/{id}/items`."""
        store, conversation_id, _ = self._found(request)
        _, items = await self._server.read(request, _read_items, store.answers)
        added = store.extend(conversation_id, items)
        if added is None:
            raise missing("conversation", conversation_id, "id")
        return await whole(pieces(listed(added, _ADDED)))

    async def item(self, request: Request) -> Response:
        """Answer `GET /v1/conversations/{id}/items/{item}`."""
        _, _, conversation = self._found(request)
        return await whole(_item(request, conversation.items).pieces())

    async def delete_item(self, request: Request) -> Response:
        """Answer `DELETE /v1/conversations/{id}/items/{item}` with the conversation."""
        store, conversation_id, conversation = self._found(request)
        gone = _item(request, conversation.items)
        left = tuple(each for each in conversation.items if each is not gone)
        conversation = replace(conversation, items=left)
        store.put_conversation(conversation_id, conversation)
        return _told(conversation_id, conversation)

    def _found(self, request: Request) -> tuple[ResponseStore, str, Conversation]:
        """Return the caller's store, and the conversation that a path names, with its id."""
        store, conversation_id = self._stores.of(request), request.path_params["id"]
        conversation = store.get_conversation(conversation_id)
        if conversation is None:
            raise missing("conversation", conversation_id, "id")
        return store, conversation_id, conversation


def _item(request: Request, items: Sequence[StoredItem]) -> StoredItem:
    """Return the item that a path names."""
    item_id = request.path_params["item"]
    for item in items:
        if item.id == item_id:
            return item
    raise missing("item", item_id, "item")


def _told(conversation_id: str, conversation: Conversation) -> Response:
    body: WireEvent = {"id": conversation_id, "object": "conversation"}
    body |= {"created_at": conversation.created_at, "metadata": dict(conversation.metadata)}
    return JSONResponse(body)
