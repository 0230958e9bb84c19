"""Pickling of frozen values that cross to another process often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any


class Compact:
    """Base of frozen dataclasses that are pickled as a tuple of their values.

    Python pickles a dataclass with slots by code of its own, which looks up the fields each time.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        own = type(self)
        return own, values_of(own)(self)  # type: ignore[arg-type]  # a class is hashable


@cache
def values_of(of: type) -> Callable[[object], tuple[Any, ...]]:
    """Return a function that returns an instance's values, in the order of the fields."""
    names = [field.name for field in fields(of)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)
