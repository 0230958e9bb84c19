"""Memory in which arrays grow without being copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx


class GrowingMemory(Protocol):
    """The memory of some arrays whose number of rows changes. It must outlive them.

    Each array has addresses for all rows that it may ever have, and memory for those that it has.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes to whose multiples the memory of each array is rounded up."""
        ...

    def resized(self, array: mx.array, rows: int, most_rows: int) -> mx.array:
        """Return a computed array with another number of rows, at the same address.

        New rows are zeros. An array of other memory is copied. Steps that run may read and write
        the rows that stay.

        Args:
            most_rows: the most rows that the array may ever have.
        """
        ...

    def keep(self, arrays: Sequence[mx.array]) -> None:
        """Free the memory that none of these arrays uses, because MLX has copied its array."""
        ...
