"""A step's rows as attention sees them, and the keys of these rows.

Most steps have one row for each of a few sequences, and the host makes their arrays while nothing
else runs. There NumPy's calls, some tens for each KV group, take several times as long as lists.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple, Protocol

import numpy as np

from quire.cache.specs import AttentionSpec
from quire.core.arrays import Ints
from quire.core.kv_format import KVFormat

MOST_LISTED = 32
"""Most rows whose own numbers lists give sooner than arrays."""


class AttentionRows(Protocol):
    """Consecutive tokens of one sequence in a step, a row each."""

    @property
    def start(self) -> int:
        """The key index of the first row, which is the number of tokens before it."""
        ...

    @property
    def count(self) -> int:
        """Number of rows, at least one."""
        ...

    @property
    def format(self) -> KVFormat:
        """How the sequence's keys and values are stored."""
        ...

    @property
    def bidirectional(self) -> Sequence[tuple[int, int]]:
        """Ranges [start, end) of key indices whose rows see each other, in order: images.

        A range ends at or before the last row, unless it starts after it.
        """
        ...

    def block_ids(self, group: int) -> array[int]:
        """Return the ids of the sequence's block table; 0 where a block has left the window."""
        ...

    def tail_block(self, group: int) -> int | None:
        """Return the id of the tail block; None in formats without tails."""
        ...


class GroupLists(NamedTuple):
    """The fields of `AttentionMetadata` that differ between KV groups."""

    first_visible: array[int]
    table_starts: array[int]
    block_table: array[int]
    first_blocks: array[int]


class RowLists:
    """The rows of a step's sequences, which are the same in each KV group.

    Attributes:
        query_starts, keys, lengths: see `AttentionMetadata`.

    Args:
        behind: block tables begin early enough for rows that begin so many rows earlier.
    """

    def __init__(self, sequences: Sequence[AttentionRows], behind: int = 0) -> None:
        self._sequences, self._behind = sequences, behind
        spans = [range(each.start, each.start + each.count) for each in sequences]
        self.query_starts = array("i", accumulate(map(len, spans), initial=0))
        self.keys = array("i", chain.from_iterable(spans))
        self.lengths = array("i", [span.stop for span in spans])
        self._spans = spans

    def of_group(self, group: int, spec: AttentionSpec, block_size: int) -> GroupLists:
        """Return the rows' lists in a KV group."""
        earliest = [max(0, span.start - self._behind) for span in self._spans]
        firsts = [key // block_size for key in spec.first_visible_of(earliest)]
        lasts = [(length - 1) // block_size for length in self.lengths]
        table, starts = block_tables(group, self._sequences, firsts, lasts=lasts)
        return GroupLists(
            _first_visible(spec, self.keys), starts, table, first_blocks=array("i", firsts)
        )

    def blocks(self, own: GroupLists, block_size: int) -> array[int]:
        """Return the id of the block that each row's key is written to, `[T]`.

        Args:
            own: the lists of the KV group.
        """
        if len(self.keys) <= MOST_LISTED:
            table = own.block_table
            parts = zip(self._spans, own.table_starts, own.first_blocks, strict=False)
            blocks = [
                table[at - first + key // block_size] for span, at, first in parts for key in span
            ]
            return array("i", blocks)
        counts = [len(span) for span in self._spans]
        shifts = np.repeat(ints(own.table_starts)[:-1] - ints(own.first_blocks), counts)
        places = shifts + ints(self.keys) // block_size
        return array("i", ints(own.block_table)[places].tobytes())

    def by_row(self, of_sequences: Sequence[int]) -> array[int]:
        """Repeat a number for each sequence, `[S]`, for each of its rows, `[T]`."""
        pairs = zip(of_sequences, self._spans, strict=True)
        return array("i", [number for number, span in pairs for _ in span])


def _first_visible(spec: AttentionSpec, keys: array[int]) -> array[int]:
    """Return the first key that each row sees."""
    if len(keys) <= MOST_LISTED:
        return array("i", spec.first_visible_of(keys))
    return array("i", spec.first_visible_each(ints(keys)).tobytes())


def block_tables(
    group: int, sequences: Sequence[AttentionRows], firsts: Sequence[int], lasts: Sequence[int]
) -> tuple[array[int], array[int]]:
    """Return the block ids that sequences see, one table behind the other.

    Args:
        firsts, lasts: the number, in its sequence, of the first and the last block of each.

    Returns:
        `block_table` and `table_starts`; see `AttentionMetadata`.
    """
    table, starts = array("i"), array("i", [0])
    for each, first, last in zip(sequences, firsts, lasts, strict=True):
        table.extend(each.block_ids(group)[first : last + 1])
        starts.append(len(table))
    return table, starts


def ints(numbers: array[int]) -> Ints:
    """Return a list's memory as an array."""
    return np.frombuffer(numbers, np.int32)
