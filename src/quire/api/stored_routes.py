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
        summary="Keeps a conversation, which responses may continue",
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
        summary="Replaces the metadata of a conversation",
        body=ConversationUpdate,
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.conversations.delete,
        "delete",
        path="/v1/conversations/{id}",
        summary="Forgets a conversation",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.conversations.items,
        "get",
        path="/v1/conversations/{id}/items",
        summary="The items of a conversation",
        query=ItemsQuery,
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.conversations.add_items,
        "post",
        path="/v1/conversations/{id}/items",
        summary="Appends items to a conversation",
        body=ItemsFields,
        statuses=(404, 429, 503),
    ),
    Operation(
        lambda e: e.conversations.item,
        "get",
        path="/v1/conversations/{id}/items/{item}",
        summary="An item of a conversation",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.conversations.delete_item,
        "delete",
        path="/v1/conversations/{id}/items/{item}",
        summary="Removes an item from a conversation",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.list,
        "get",
        path="/v1/chat/completions",
        summary="The stored chat completions",
        query=ChatsQuery,
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.retrieve,
        "get",
        path="/v1/chat/completions/{id}",
        summary="A stored chat completion",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.update,
        "post",
        path="/v1/chat/completions/{id}",
        summary="Replaces the metadata of a stored chat completion",
        body=ChatUpdate,
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.delete,
        "delete",
        path="/v1/chat/completions/{id}",
        summary="Forgets a stored chat completion",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.messages,
        "get",
        path="/v1/chat/completions/{id}/messages",
        summary="The messages that a stored chat completion answers",
        query=MessagesQuery,
        statuses=_FOUND,
    ),
)
