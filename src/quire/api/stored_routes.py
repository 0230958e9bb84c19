"""Routes of responses, conversations and chat completions that are kept."""

from __future__ import annotations

from quire.api.chat.stored import ChatsQuery, ChatUpdate, MessagesQuery
from quire.api.operations import Operation
from quire.api.resources import Resource
from quire.api.responses.conversations import (
    ConversationFields,
    ConversationUpdate,
    ItemsFields,
)
from quire.api.responses.listing import ItemsQuery

_STORED = (404, 429, 503)
_RESPONSES = Resource("/v1/responses", "stored response", "the stored responses")
_CONVERSATIONS = Resource("/v1/conversations", "conversation", "the conversations", stored=_STORED)
_ITEMS = Resource(
    f"{_CONVERSATIONS.own}/items",
    "item of a conversation",
    "the items of a conversation",
    stored=_STORED,
    key="item",
    article="an",
)
_CHATS = Resource("/v1/chat/completions", "stored chat completion", "the stored chat completions")

STORED: tuple[Operation, ...] = (
    _RESPONSES.retrieve(lambda e: e.responses.retrieve),
    _RESPONSES.cancel(lambda e: e.responses.cancel),
    _RESPONSES.part(
        lambda e: e.responses.input_items,
        "input_items",
        "List the input items of a stored response",
        query=ItemsQuery,
    ),
    _RESPONSES.delete(lambda e: e.responses.delete),
    _CONVERSATIONS.create(
        lambda e: e.conversations.create,
        "Create a conversation, which responses can continue",
        ConversationFields,
    ),
    _CONVERSATIONS.retrieve(lambda e: e.conversations.retrieve),
    _CONVERSATIONS.update(lambda e: e.conversations.update, ConversationUpdate),
    _CONVERSATIONS.delete(lambda e: e.conversations.delete),
    _ITEMS.list(lambda e: e.conversations.items, ItemsQuery),
    _ITEMS.create(
        lambda e: e.conversations.add_items, "Append items to a conversation", ItemsFields
    ),
    _ITEMS.retrieve(lambda e: e.conversations.item),
    _ITEMS.delete(lambda e: e.conversations.delete_item),
    _CHATS.list(lambda e: e.chats.list, ChatsQuery),
    _CHATS.retrieve(lambda e: e.chats.retrieve),
    _CHATS.update(lambda e: e.chats.update, ChatUpdate),
    _CHATS.delete(lambda e: e.chats.delete),
    _CHATS.part(
        lambda e: e.chats.messages,
        "messages",
        "List the input messages of a stored chat completion",
        query=MessagesQuery,
    ),
)
