"""Answers that are kept, so that later requests can go on from them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from quire.api.responses_schema import Item
from quire.api.sse import compact


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and the whole conversation that it ends.

    Attributes:
        items: everything that was said, this answer's items last.
        size: bytes, the conversation's included; what conversations share counts for each of them.
    """

    body: dict[str, Any]
    items: tuple[Item, ...]
    size: int


class ResponseStore:
    """The responses used last, within bounds of count and bytes. Lives as long as the server.

    Every response holds its own conversation, so that none ends with an earlier one's eviction.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, body: dict[str, Any], items: tuple[Item, ...]) -> None:
        """Keeps a response; what was not used for longest goes. One too large is not kept."""
        size = len(compact(body)) + sum(len(item.model_dump_json()) for item in items)
        self._stored[body["id"]] = Stored(body, items, size)
        self.size += size
        while len(self._stored) > self._max_count or self.size > self._max_bytes:
            self.size -= self._stored.popitem(last=False)[1].size

    def get(self, response_id: str) -> Stored | None:
        """A kept response, used now; None if there is none of this id."""
        stored = self._stored.get(response_id)
        if stored is not None:
            self._stored.move_to_end(response_id)
        return stored

    def remove(self, response_id: str) -> bool:
        """Forgets a response; False if there is none of this id."""
        stored = self._stored.pop(response_id, None)
        if stored is None:
            return False
        self.size -= stored.size
        return True

    def item(self, item_id: str) -> Item | None:
        """An item of a kept conversation, by its id."""
        for stored in reversed(self._stored.values()):
            for item in reversed(stored.items):
                if item.id == item_id:
                    return item
        return None
