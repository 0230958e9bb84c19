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
        "/v1/conversations",
        "Keeps a conversation, which responses may continue",
        ConversationFields,
        statuses=(404, 429, 503),
    ),
    Operation(
        lambda e: e.conversations.retrieve,
        "get",
        "/v1/conversations/{id}",
        "A conversation",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.conversations.update,
        "post",
        "/v1/conversations/{id}",
        "Replaces the metadata of a conversation",
        ConversationUpdate,
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.conversations.delete,
        "delete",
        "/v1/conversations/{id}",
        "Forgets a conversation",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.conversations.items,
        "get",
        "/v1/conversations/{id}/items",
        "The items of a conversation",
        query=ItemsQuery,
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.conversations.add_items,
        "post",
        "/v1/conversations/{id}/items",
        "Appends items to a conversation",
        ItemsFields,
        statuses=(404, 429, 503),
    ),
    Operation(
        lambda e: e.conversations.item,
        "get",
        "/v1/conversations/{id}/items/{item}",
        "An item of a conversation",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.conversations.delete_item,
        "delete",
        "/v1/conversations/{id}/items/{item}",
        "Removes an item from a conversation",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.list,
        "get",
        "/v1/chat/completions",
        "The stored chat completions",
        query=ChatsQuery,
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.retrieve,
        "get",
        "/v1/chat/completions/{id}",
        "A stored chat completion",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.update,
        "post",
        "/v1/chat/completions/{id}",
        "Replaces the metadata of a stored chat completion",
        ChatUpdate,
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.delete,
        "delete",
        "/v1/chat/completions/{id}",
        "Forgets a stored chat completion",
        statuses=_FOUND,
    ),
    Operation(
        lambda e: e.chats.messages,
        "get",
        "/v1/chat/completions/{id}/messages",
        "The messages that a stored chat completion answers",
        query=MessagesQuery,
        statuses=_FOUND,
    ),
)
