"""Stored entries of one API key: the most recently used ones, bounded together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from starlette.requests import Request

from quire.api.shared.auth import EVERYONE, caller_of


class Entry(Protocol):
    """A stored value of any kind."""

    @property
    def size(self) -> int:
        """Its bytes."""

    @property
    def running(self) -> bool:
        """Whether another entry will replace it. It is not evicted before that."""


Kind = TypeVar("Kind", bound=Entry)


class Entries:
    """The most recently used entries of one API key, bounded by count and bytes.

    Attributes:
        on_put: called with the id of each entry that is stored, and the entry.
        on_removed: called likewise with each that is removed, replaced or evicted.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self.on_put: Callable[[str, Entry], None] = lambda entry_id, entry: None
        self.on_removed: Callable[[str, Entry], None] = lambda entry_id, entry: None
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry_id: str, entry: Entry) -> None:
        """Store an entry, replacing one of the same id. Evict the least recently used that do not
        run.

        One that is too large is not stored, unless it runs.
        """
        self._remove(entry_id)
        self._entries[entry_id] = entry
        self.size += entry.size
        self.on_put(entry_id, entry)
        while len(self._entries) > self._max_count or self.size > self._max_bytes:
            oldest = next((id for id, each in self._entries.items() if not each.running), None)
            if oldest is None:
                break
            self._remove(oldest)

    def get(self, entry_id: str, kind: type[Kind]) -> Kind | None:
        """Return an entry and mark it as used; None if none of this kind has the id."""
        entry = self._entries.get(entry_id)
        if not isinstance(entry, kind):
            return None
        self._entries.move_to_end(entry_id)
        return entry

    def all(self, kind: type[Kind]) -> Iterator[tuple[str, Kind]]:
        """Yield the entries of a kind with their ids, the least recently used first."""
        for entry_id, entry in self._entries.items():
            if isinstance(entry, kind):
                yield entry_id, entry

    def remove(self, entry_id: str, kind: type[Kind]) -> bool:
        """Remove an entry. Return False if none of this kind has the id."""
        found = isinstance(self._entries.get(entry_id), kind)
        if found:
            self._remove(entry_id)
        return found

    def _remove(self, entry_id: str) -> None:
        entry = self._entries.pop(entry_id, None)
        if entry is not None:
            self.size -= entry.size
            self.on_removed(entry_id, entry)


class CallerEntries:
    """One `Entries` per API key, so that keys cannot read each other's.

    Args:
        callers: callers of the API keys. Without any there is one for everyone.
    """

    def __init__(self, callers: Iterable[str], max_count: int, max_bytes: int) -> None:
        who = set(callers) or {EVERYONE}
        self.by_caller = {each: Entries(max_count, max_bytes // len(who)) for each in who}

    def of(self, request: Request) -> Entries:
        """Return the entries of the request's caller."""
        return self.by_caller[caller_of(request.scope)]
