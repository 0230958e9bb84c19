"""Copies of frozen values with many fields, some of them changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["changed"]

if TYPE_CHECKING:
    from dataclasses import replace as changed  # so that mypy checks the names and types of changes
else:

    def changed(value: Any, /, **changes: Any) -> Any:
        """Do as `dataclasses.replace`, for a dataclass without slots and `__post_init__`.

        `dataclasses.replace` reads each field and sets it by `__init__`. A request's generation has
        41 fields and is copied five times.

        Raises:
            TypeError: a change names no field, or the class has slots.
        """
        of = type(value)
        if not changes.keys() <= of.__dataclass_fields__.keys():
            unknown = ", ".join(changes.keys() - of.__dataclass_fields__.keys())
            raise TypeError(f"{of.__name__} has no such field: {unknown}")
        copy = object.__new__(of)
        vars(copy).update(vars(value), **changes)
        return copy
