"""A cache bounded by bytes that evicts the least recently used value."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """A thread-safe cache bounded by the total size of its values; it evicts the least recently
    used.

    Args:
        size: returns the bytes of a value.
    """

    def __init__(self, max_bytes: int, size: Callable[[Value], int]) -> None:
        self._max_bytes = max_bytes
        self._size = size
        self._bytes = 0
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        """Return the value and mark it as used; None if it is not cached."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Key, value: Value) -> Value:
        """Store a value and return it, or the value that another thread has stored meanwhile."""
        with self._lock:
            if key in self._values:
                return self._values[key]
            if self._size(value) <= self._max_bytes:
                self._values[key] = value
                self._bytes += self._size(value)
            while self._bytes > self._max_bytes:
                _, gone = self._values.popitem(last=False)
                self._bytes -= self._size(gone)
            return value

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._values.clear()
            self._bytes = 0
