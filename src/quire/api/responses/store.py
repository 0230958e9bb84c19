"""Answers that are kept, so that later requests can go on from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from quire.api.responses.schema import Item
from quire.api.shared.auth import EVERYONE, caller_of
from quire.api.shared.sse import compact


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

    def conversation(self, response_id: str) -> tuple[Item, ...] | None:
        """The whole conversation that a kept response ends."""
        stored = self.get(response_id)
        return None if stored is None else stored.items

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


class CallerStores:
    """A store for each caller, so that nobody knows of another's responses.

    Args:
        callers: of the API keys; without any there is one store, for everyone.
    """

    def __init__(self, callers: Iterable[str], max_count: int, max_bytes: int) -> None:
        who = set(callers) or {EVERYONE}
        self._stores = {each: ResponseStore(max_count, max_bytes // len(who)) for each in who}

    def of(self, request: Request) -> ResponseStore:
        """The responses of whoever asks."""
        return self._stores[caller_of(request.scope)]
