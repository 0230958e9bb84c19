"""Routes of stored conversations and chat completions."""

from __future__ import annotations

from quire.api.chat.stored import ChatsQuery, ChatUpdate, MessagesQuery
from quire.api.operations import Operation
from quire.api.responses.conversations import (
    ConversationFields,
    ConversationUpdate,
    ItemsFields,
)
from quire.api.responses.listing import ItemsQuery

_FOUND = (404,)

STORED: tuple[Operation, ...] = (
    Operation(
        lambda e: e.conversations.create,
        "post",
        path="/v1/conversations",
        summary="Create a conversation, which responses can continue",
        body=ConversationFields,
        statuses=(404, 429, 503),
    ),
    Operation(
        lambda e: e.conversations.retrieve,
        "get",
        path="/v1/conversations/{id}",
        summary="A conversation",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.conversations.update,
        "post",
        path="/v1/conversations/{id}",
        summary="Replace the metadata of a conversation",
        body=ConversationUpdate,
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.conversations.delete,
        "delete",
        path="/v1/conversations/{id}",
        summary="Delete a conversation",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.conversations.items,
        "get",
        path="/v1/conversations/{id}/items",
        summary="List the items of a conversation",
        query=ItemsQuery,
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.conversations.add_items,
        "post",
        path="/v1/conversations/{id}/items",
        summary="Append items to a conversation",
        body=ItemsFields,
        statuses=(404, 429, 503),
    ),
    Operation(
        lambda e: e.conversations.item,
        "get",
        path="/v1/conversations/{id}/items/{item}",
        summary="Retrieve an item of a conversation",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.conversations.delete_item,
        "delete",
        path="/v1/conversations/{id}/items/{item}",
        summary="Delete an item of a conversation",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.list,
        "get",
        path="/v1/chat/completions",
        summary="List the stored chat completions",
        query=ChatsQuery,
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.retrieve,
        "get",
        path="/v1/chat/completions/{id}",
        summary="Retrieve a stored chat completion",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.update,
        "post",
        path="/v1/chat/completions/{id}",
        summary="Replace the metadata of a stored chat completion",
        body=ChatUpdate,
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.delete,
        "delete",
        path="/v1/chat/completions/{id}",
        summary="Delete a stored chat completion",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.messages,
        "get",
        path="/v1/chat/completions/{id}/messages",
        summary="List the input messages of a stored chat completion",
        query=MessagesQuery,
        statuses=_FOUND,
    ),
)
