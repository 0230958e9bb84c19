"""A step's inputs for few rows, over plain blocks, made by lists.

A step with drafts is launched only once its inputs are there. Calls of NumPy, about ninety for two
KV groups, take 2.5 times as long as lists of one sequence's rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from quire.attention.paged.tiles import TILE_FIELDS
from quire.attention.rows import MOST_LISTED, RowLists
from quire.cache.specs import AttentionSpec
from quire.scheduler.plan import ScheduledSequence


class FewRows:
    """Writes the inputs of rows among a step's integers.

    Attributes:
        table: block ids of all groups so far.

    Args:
        numbers: the step's integers but for the block table.
        behind: see `RowLists`.
    """

    def __init__(
        self,
        numbers: array[int],
        rows: Sequence[ScheduledSequence],
        block_size: int,
        behind: int = 0,
    ) -> None:
        self._numbers, self._size = numbers, block_size
        self.table = array("i")
        self._lists = lists = RowLists(rows, behind)
        self._offsets = array("i", [key % block_size for key in lists.keys])
        self._ordinals = array("i", range(len(lists.keys)))
        self._ones = array("i", [1]) * len(lists.keys)
        self._ends = array("i", [key + 1 for key in lists.keys])
        self._firsts = lists.by_row([each.start for each in rows])

    def write(self, at: int, numbers: Iterable[int], step: int = 1) -> None:
        """Write a number for each row to places that lie `step` apart."""
        own = numbers if isinstance(numbers, array) else array("i", numbers)
        self._numbers[at : at + step * len(own) : step] = own

    def write_group(
        self, group: int, spec: AttentionSpec, blocks: int, offsets: int, visible: int, tiles: int
    ) -> None:
        """Write a KV group's inputs, and add its blocks to the table.

        Args:
            blocks, offsets, visible, tiles: places of the fields of `GroupInputs`.
        """
        own = self._lists.of_group(group, spec, self._size)
        entries, seen = len(self.table), own.first_visible
        self.table += own.block_table
        self.write(blocks, self._lists.blocks(own, self._size))
        self.write(offsets, self._offsets)
        self.write(visible, seen, 2)
        self.write(visible + 1, self._lists.keys, 2)
        starts = zip(own.table_starts, own.first_blocks, strict=False)
        places = self._lists.by_row([entries + start - first for start, first in starts])
        fields = self._ordinals, self._ones, seen, self._ends, places, self._firsts
        for number, field in enumerate(fields):
            self.write(tiles + number, field, TILE_FIELDS)


def serves_few(rows: Sequence[ScheduledSequence]) -> bool:
    """Whether lists of rows are made, and take less time than arrays."""
    return sum(each.count for each in rows) <= MOST_LISTED and may_list(rows)


def may_list(rows: Sequence[ScheduledSequence]) -> bool:
    """Whether `FewRows` serves rows: none has a tail, media, or positions that differ between
    axes.
    """
    plain = not rows[0].format.has_tail
    return plain and all(not each.media and isinstance(each.positions, range) for each in rows)
