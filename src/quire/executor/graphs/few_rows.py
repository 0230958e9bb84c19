"""A step's inputs for few rows, over plain blocks, made by lists.

A step with drafts is launched only once its inputs are there. Calls of NumPy, about ninety for two
KV groups, take 2.5 times as long as lists of one sequence's rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

from quire.attention.paged.tiles import TILE_FIELDS
from quire.cache.specs import AttentionSpec
from quire.scheduler.plan import ScheduledSequence

_MOST_ROWS = 32
"""Most rows for which lists take less time than arrays."""


class FewRows:
    """Writes the inputs of rows among a step's integers.

    Attributes:
        table: block ids of all groups so far.

    Args:
        numbers: the step's integers but for the block table.
    """

    def __init__(
        self, numbers: array[int], rows: Sequence[ScheduledSequence], block_size: int
    ) -> None:
        self._numbers, self._rows, self._size = numbers, rows, block_size
        self.table = array("i")
        self._spans = [range(each.start, each.start + each.count) for each in rows]
        self._keys = list(chain.from_iterable(self._spans))
        self._blocks = [key // block_size for key in self._keys]
        self._offsets = array("i", [key % block_size for key in self._keys])
        self._ordinals = array("i", range(len(self._keys)))
        self._ones = array("i", [1]) * len(self._keys)
        self._lasts = array("i", self._keys)
        self._ends = array("i", [key + 1 for key in self._keys])
        self._firsts = self._by_row([span.start for span in self._spans])

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
        table, size = self.table, self._size
        first_visible = array("i", map(spec.first_visible, self._keys))
        ids, places = list[int](), list[int]()
        row = 0
        for each, span in zip(self._rows, self._spans, strict=True):
            first, own = first_visible[row] // size, each.block_ids(group)
            places.append(len(table) - first)
            table += own[first : (span.stop - 1) // size + 1]
            next_row = row + len(span)
            ids += [own[block] for block in self._blocks[row:next_row]]
            row = next_row
        self.write(blocks, ids)
        self.write(offsets, self._offsets)
        self.write(visible, first_visible, 2)
        self.write(visible + 1, self._lasts, 2)
        fields = self._ordinals, self._ones, first_visible, self._ends, self._by_row(places)
        for number, field in enumerate((*fields, self._firsts)):
            self.write(tiles + number, field, TILE_FIELDS)

    def _by_row(self, of_sequences: Sequence[int]) -> array[int]:
        """Repeat a number for each sequence for each of its rows."""
        pairs = zip(of_sequences, self._spans, strict=True)
        return array("i", [number for number, span in pairs for _ in span])


def serves_few(rows: Sequence[ScheduledSequence]) -> bool:
    """Whether `FewRows` serves rows: they are few, and none has a tail, media, or positions that
    differ between axes.
    """
    few = sum(each.count for each in rows) <= _MOST_ROWS and not rows[0].format.has_tail
    return few and all(not each.media and isinstance(each.positions, range) for each in rows)
