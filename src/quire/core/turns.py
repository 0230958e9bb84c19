"""Fair turns by key: the key with the least use of a shared resource goes next. Pure Python.

The counters are those of the Virtual Token Counter (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024). Each key's use adds up, and the key with the lowest sum goes first. A
key that returns after a pause starts at the lowest sum of the active keys, so that nobody saves up
turns while idle. The caller chooses the unit of use: seconds of a process, or rows of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class Shares(Generic[Key]):
    """The use of one resource by each key. Owned by the part that hands the resource out."""

    def __init__(self) -> None:
        self._used: dict[Key, float] = {}
        self._active: set[Key] = set()
        self._floor = 0.0
        """The lowest use among active keys, as last seen; never falls."""

    def used(self, key: Key) -> float:
        """Return the counted use of `key`."""
        return max(self._used.get(key, 0.0), 0.0 if key in self._active else self._lowest())

    def activate(self, key: Key) -> None:
        """Count `key` as waiting. If it was not active, it starts at the lowest use."""
        if key not in self._active:
            self._used[key] = self.used(key)
            self._active.add(key)

    def deactivate(self, key: Key) -> None:
        """Stop counting `key` as waiting."""
        self._floor = self._lowest()
        self._active.discard(key)

    def charge(self, key: Key, amount: float) -> None:
        """Add to the use of `key`."""
        self._used[key] = self.used(key) + amount

    def ordered(self, keys: Iterable[Key]) -> list[Key]:
        """Return distinct keys, the least used first; equal ones keep their order.

        These keys are the active ones from now on.
        """
        asking = dict.fromkeys(keys)
        for key in asking:
            self.activate(key)
        for key in self._active - asking.keys():
            self.deactivate(key)
        return sorted(asking, key=self.used)

    def _lowest(self) -> float:
        active = min((self._used[key] for key in self._active), default=self._floor)
        return max(self._floor, active)


class Turns(Generic[Key, Item]):
    """Items that wait, each under its key. Items of one key keep their order.

    A key is active in `shares` from its first item until `release`. The owner calls `release` once
    for each taken item, when it has stopped using the resource.
    """

    def __init__(self) -> None:
        self.shares: Shares[Key] = Shares()
        self._waiting: dict[Key, deque[Item]] = {}
        self._taken: dict[Key, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def count(self, key: Key) -> int:
        """Return how many items of `key` wait."""
        return len(self._waiting.get(key, ()))

    def add(self, key: Key, item: Item, *, first: bool = False) -> None:
        """Queue an item after the others of its key, or before them if `first`."""
        self.shares.activate(key)
        items = self._waiting.setdefault(key, deque())
        if first:
            items.appendleft(item)
        else:
            items.append(item)

    def discard(self, key: Key, item: Item) -> bool:
        """Remove a waiting item. Return False if it does not wait here."""
        items = self._waiting.get(key)
        if items is None or item not in items:
            return False
        items.remove(item)
        self._settle(key)
        return True

    def next(self) -> tuple[Key, Item] | None:
        """Return the next item and its key, without removing it."""
        if not self._waiting:
            return None
        key = min(self._waiting, key=self.shares.used)
        return key, self._waiting[key][0]

    def take(self) -> tuple[Key, Item] | None:
        """Remove and return the next item."""
        found = self.next()
        if found is not None:
            key, _ = found
            self._taken[key] = self._taken.get(key, 0) + 1
            self._waiting[key].popleft()
            self._settle(key)
        return found

    def release(self, key: Key) -> None:
        """Record that a taken item no longer uses the resource."""
        self._taken[key] -= 1
        self._settle(key)

    def _settle(self, key: Key) -> None:
        if not self._waiting.get(key):
            self._waiting.pop(key, None)
            if not self._taken.get(key):
                self._taken.pop(key, None)
                self.shares.deactivate(key)
