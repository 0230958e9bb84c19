"""Stored answers, which later requests can continue.

They are stored as JSON. A request that continues a long one reads it outside the event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from quire.api.responses.stored_item import StoredItem
from quire.api.shared.auth import EVERYONE, caller_of
from quire.api.shared.stored import StoredConversations
from quire.serving.generation import NeedsJob

_LIGHT = 16 << 10
"""Bytes of kept items up to which reading them holds up no stream."""
_OBJECTS = 512
"""Bytes that an item and its place in the index take beside its text."""


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
    size: int
    running: bool = False
    background: bool = False

    @property
    def items(self) -> Sequence[StoredItem]:
        """The conversation, with the answer last."""
        return (*self.said, *self.output)


class ResponseStore:
    """The most recently used responses, bounded by count and bytes. Lives as long as the server.

    Every response holds its whole conversation, so evicting an earlier one breaks none.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._items: dict[str, dict[str, StoredItem]] = {}
        """Items by id, then by the id of their response, the newest last."""
        self.size = 0

    def __len__(self) -> int:
        return len(self._stored)

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
        """Store a response, replacing one of the same id. Evict the least recently used.

        One that is too large is not stored.
        """
        self.remove(response_id)
        items = (*said, *output)
        size = sum(map(len, body)) + sum(len(each.written) + _OBJECTS for each in items)
        self._stored[response_id] = Stored(
            body, said, output, size=size, running=running, background=background
        )
        self.size += size
        for item in items:
            self._items.setdefault(item.id, {})[response_id] = item
        while len(self._stored) > self._max_count or self.size > self._max_bytes:
            self.remove(next(iter(self._stored)))

    def get(self, response_id: str) -> Stored | None:
        """Return a stored response and mark it as used; None if there is none of this id."""
        stored = self._stored.get(response_id)
        if stored is not None:
            self._stored.move_to_end(response_id)
        return stored

    def conversation(self, response_id: str) -> Sequence[StoredItem] | None:
        """Return the conversation including the response's answer; None until it has ended."""
        stored = self.get(response_id)
        return None if stored is None or stored.running else stored.items

    def remove(self, response_id: str) -> bool:
        """Remove a response. Return False if it is not stored."""
        stored = self._stored.pop(response_id, None)
        if stored is None:
            return False
        self.size -= stored.size
        for item in stored.items:
            holders = self._items[item.id]
            del holders[response_id]
            if not holders:
                del self._items[item.id]
        return True

    def item(self, item_id: str) -> StoredItem | None:
        """Return an item of a stored conversation, by its id."""
        holders = self._items.get(item_id)
        return next(reversed(holders.values())) if holders else None


class LightReading:
    """A bounded view of the store for one request that is read on the event loop.

    Raises:
        NeedsJob: it is more.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._room = _LIGHT

    def conversation(self, response_id: str) -> Sequence[StoredItem] | None:
        conversation = self._store.conversation(response_id)
        self._take(conversation or ())
        return conversation

    def item(self, item_id: str) -> StoredItem | None:
        item = self._store.item(item_id)
        self._take(() if item is None else (item,))
        return item

    def _take(self, items: Sequence[StoredItem]) -> None:
        self._room -= sum(len(each.written) for each in items)
        if self._room < 0:
            raise NeedsJob


class CallerStores:
    """One store per API key, so that keys cannot read each other's responses.

    Args:
        callers: callers of the API keys. Without any there is one store for everyone.
    """

    def __init__(self, callers: Iterable[str], max_count: int, max_bytes: int) -> None:
        who = set(callers) or {EVERYONE}
        self._stores = {each: ResponseStore(max_count, max_bytes // len(who)) for each in who}

    def of(self, request: Request) -> ResponseStore:
        """Return the store of the request's caller."""
        return self._stores[caller_of(request.scope)]

    def reading(self, request: Request, light: bool) -> StoredConversations[StoredItem]:
        """Return the caller's store for a reader; bounded if `light`, on the event loop."""
        return LightReading(self.of(request)) if light else self.of(request)
