"""Structured types of a step's inputs, and the device addresses of their fields.

A dataclass names the fields once. The host writes them by name through the structured type; kernels
read them at the addresses, which an instance of the dataclass holds.
"""

from __future__ import annotations

from dataclasses import field, fields
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

_Record = TypeVar("_Record")
StepRecord = npt.NDArray[np.void]
"""Records on the host, `[1]`, so that a field is an array `[1, max_rows, ...]`."""


def by_row(*shape: int) -> Any:
    """Declare a field: int32 `[max_rows, *shape]` on the host, an address on the device."""
    return field(metadata={"shape": shape, "by_row": True})


def once(*shape: int) -> Any:
    """Declare a field: int32 `shape` on the host, an address on the device."""
    return field(metadata={"shape": shape, "by_row": False})


@cache
def record_type(record: type, max_rows: int) -> np.dtype[np.void]:
    """Return the structured type of a dataclass whose fields are declared by `by_row` or `once`."""
    rows = {True: (max_rows,), False: ()}
    return np.dtype(
        [
            (each.name, np.int32, (*rows[each.metadata["by_row"]], *each.metadata["shape"]))
            for each in fields(record)
        ]
    )


def addresses(record: type[_Record], start: int, max_rows: int) -> _Record:
    """Return the addresses of a record's fields.

    Args:
        start: address of the record.
    """
    found = record_type(cast(type, record), max_rows).fields
    assert found is not None, "records have fields"
    return record(**{name: start + offset for name, (_, offset, *_) in found.items()})
