"""Stored answers and conversations, which later requests can continue.

They are stored as JSON. A request that continues a long one reads it outside the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from starlette.requests import Request

from quire.api.responses.stored_item import StoredItem
from quire.api.shared.auth import caller_of
from quire.api.shared.entries import CallerEntries, Entries, Entry
from quire.api.shared.pieces import compact
from quire.api.shared.stored import StoredConversations
from quire.serving.generation import NeedsJob

_LIGHT = 16 << 10
"""Most bytes of stored items that are read in the event loop; more would delay other streams."""
_OBJECTS = 512
"""Bytes that an item and its index entry take in memory beside its text."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and the whole conversation that it ends.

    Attributes:
        body: the response's JSON, in pieces.
        said: the conversation before the answer.
        output: the answer.
        running: whether the answer is still to come.
        background: whether the answer continues without its client.
        size: bytes, including the conversation. Items shared by conversations count for each.
    """

    body: Sequence[bytes]
    said: Sequence[StoredItem]
    output: Sequence[StoredItem]
    running: bool = False
    background: bool = False
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(map(len, self.body)) + _size(self.items))

    @property
    def items(self) -> Sequence[StoredItem]:
        """The conversation, with the answer last."""
        return (*self.said, *self.output)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that clients create, and that responses continue.

    Attributes:
        created_at: seconds since 1970.
        size: bytes.
    """

    created_at: int
    metadata: Mapping[str, str]
    items: Sequence[StoredItem] = ()
    size: int = field(init=False)
    running: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(compact(self.metadata)) + _size(self.items))


def _size(items: Sequence[StoredItem]) -> int:
    return sum(len(each.written) + _OBJECTS for each in items)


class ResponseStore:
    """The responses and conversations of one API key, and their items by id.

    Every response holds its whole conversation, so evicting an earlier one breaks none.

    Args:
        entries: holds them, beside other entries of the key. Lives as long as the server.
    """

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._items: dict[str, dict[str, StoredItem]] = {}
        """Items by id, then by the id of their response or conversation, the newest last."""
        entries.on_put, entries.on_removed = self._index, self._forget

    def add(
        self,
        response_id: str,
        body: Sequence[bytes],
        said: Sequence[StoredItem],
        output: Sequence[StoredItem],
        *,
        running: bool = False,
        background: bool = False,
    ) -> None:
        """Store a response, replacing one of the same id."""
        stored = Stored(body, said, output, running=running, background=background)
        self._entries.put(response_id, stored)

    def get(self, response_id: str) -> Stored | None:
        """Return a stored response and mark it as used; None if there is none of this id."""
        return self._entries.get(response_id, Stored)

    def remove(self, response_id: str) -> bool:
        """Remove a response. Return False if it is not stored."""
        return self._entries.remove(response_id, Stored)

    def history(self, response_id: str) -> Sequence[StoredItem] | None:
        """Return the conversation including the response's answer; None until it has ended."""
        stored = self.get(response_id)
        return None if stored is None or stored.running else stored.items

    def item(self, item_id: str) -> StoredItem | None:
        """Return an item of a response or conversation, by its id."""
        holders = self._items.get(item_id)
        return next(reversed(holders.values())) if holders else None

    def put_conversation(self, conversation_id: str, conversation: Conversation) -> None:
        """Store a conversation, replacing one of the same id."""
        self._entries.put(conversation_id, conversation)

    def get_conversation(self, conversation_id: str) -> Conversation | None:
        """Return a conversation and mark it as used; None if there is none of this id."""
        return self._entries.get(conversation_id, Conversation)

    def remove_conversation(self, conversation_id: str) -> bool:
        """Remove a conversation. Return False if it is not stored."""
        return self._entries.remove(conversation_id, Conversation)

    def conversation(self, conversation_id: str) -> Sequence[StoredItem] | None:
        """Return the items of a conversation; None if there is none of this id."""
        found = self.get_conversation(conversation_id)
        return None if found is None else found.items

    def extend(
        self, conversation_id: str, items: Sequence[StoredItem]
    ) -> Sequence[StoredItem] | None:
        """Append items to a conversation, with new ids where theirs are taken.

        Returns:
            The items as they are stored; None if the conversation is gone.
        """
        found = self.get_conversation(conversation_id)
        if found is None:
            return None
        taken = {each.id for each in found.items}
        added = tuple(each.beside(taken) for each in items)
        self.put_conversation(conversation_id, replace(found, items=(*found.items, *added)))
        return added

    @property
    def answers(self) -> dict[str, Callable[..., object]]:
        """The functions by which a job may query the store."""
        return {
            "history": self.history,
            "conversation": self.conversation,
            "stored_item": self.item,
        }

    def _index(self, holder: str, entry: Entry) -> None:
        if isinstance(entry, Stored | Conversation):
            for item in entry.items:
                self._items.setdefault(item.id, {})[holder] = item

    def _forget(self, holder: str, entry: Entry) -> None:
        if isinstance(entry, Stored | Conversation):
            for item in entry.items:
                holders = self._items[item.id]
                del holders[holder]
                if not holders:
                    del self._items[item.id]


class LightReading:
    """A bounded view of the store for one request that is read on the event loop.

    Raises:
        NeedsJob: it is more.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._room = _LIGHT

    def history(self, response_id: str) -> Sequence[StoredItem] | None:
        return self._take_all(self._store.history(response_id))

    def conversation(self, conversation_id: str) -> Sequence[StoredItem] | None:
        return self._take_all(self._store.conversation(conversation_id))

    def item(self, item_id: str) -> StoredItem | None:
        item = self._store.item(item_id)
        self._take(() if item is None else (item,))
        return item

    def _take_all(self, items: Sequence[StoredItem] | None) -> Sequence[StoredItem] | None:
        self._take(items or ())
        return items

    def _take(self, items: Sequence[StoredItem]) -> None:
        self._room -= sum(len(each.written) for each in items)
        if self._room < 0:
            raise NeedsJob


class CallerStores:
    """One store per API key, so that keys cannot read each other's responses."""

    def __init__(self, entries: CallerEntries) -> None:
        self._stores = {who: ResponseStore(each) for who, each in entries.by_caller.items()}

    def of(self, request: Request) -> ResponseStore:
        """Return the store of the request's caller."""
        return self._stores[caller_of(request.scope)]

    def reading(self, request: Request, light: bool) -> StoredConversations[StoredItem]:
        """Return the caller's store for a reader; bounded if `light`, on the event loop."""
        return LightReading(self.of(request)) if light else self.of(request)
