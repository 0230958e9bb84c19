"""Rows of a step, written down by hand: what attention needs of a sequence, and no more."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.kv_format import KVFormat


@dataclass(frozen=True)
class HandRows:
    """Implements `attention.metadata.AttentionRows`.

    Attributes:
        tables: by group, the ids of the block table.
        tails: by group, the tail block.
    """

    start: int
    count: int
    format: KVFormat
    tables: tuple[Sequence[int], ...]
    tails: tuple[int, ...] = ()
    bidirectional: tuple[tuple[int, int], ...] = ()

    def block_ids(self, group: int) -> array[int]:
        return array("i", self.tables[group])

    def tail_block(self, group: int) -> int | None:
        return self.tails[group] if self.tails else None

    @property
    def end(self) -> int:
        return self.start + self.count
