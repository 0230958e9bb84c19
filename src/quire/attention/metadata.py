"""Flat arrays that describe which keys a step's rows see, for every attention backend.

They do not depend on how a backend divides its work. They are NumPy arrays on the host; a backend
copies what it needs to the device when it prepares a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from quire.attention.rows import AttentionRows, RowLists, ints
from quire.cache.formats.slots import SlotMapping
from quire.cache.specs import AttentionSpec, KVSpec
from quire.core.arrays import Ints
from quire.core.kv_format import KVFormat


@dataclass(frozen=True)
class AttentionMetadata:
    """S sequences with T rows in one KV group and one format. Keys are numbered by their index.

    Attributes:
        query_starts: `[S + 1]`; rows `[query_starts[s], query_starts[s + 1])` are sequence s's.
        lengths: `[S]` keys of each sequence, those of this step's rows included.
        keys: `[T]` each row's own key; 0 where keys are those of media.
        first_visible, last_visible: `[T]` the keys that each row sees, inclusive.
        table_starts: `[S + 1]`; entries `[table_starts[s], table_starts[s + 1])` of the block table
            are sequence s's.
        block_table: block ids, those of a sequence from `first_blocks[s]` on up to its last key.
        first_blocks: `[S]` the number, in its sequence, of the first block that is listed: the
            first that any of its rows sees.
        blocks: `[T]` the id of the block that each row's key is written to; None for media.
        tails: `[S]` ids of the tail blocks, which hold a row's own block as written; None in
            formats that have no tails, and for media, all of whose blocks are coded.
    """

    spec: KVSpec
    format: KVFormat
    block_size: int
    query_starts: Ints
    lengths: Ints
    keys: Ints
    first_visible: Ints
    last_visible: Ints
    table_starts: Ints
    block_table: Ints
    first_blocks: Ints
    blocks: Ints | None
    tails: Ints | None

    @property
    def rows(self) -> int:
        """Number of rows, T."""
        return len(self.keys)

    @property
    def sequences(self) -> int:
        """Number of sequences, S."""
        return len(self.lengths)

    @cached_property
    def counts(self) -> Ints:
        """Rows of each sequence, `[S]`."""
        return self.query_starts[1:] - self.query_starts[:-1]

    @cached_property
    def slots(self) -> SlotMapping:
        """The write positions of the rows' own keys and values."""
        assert self.blocks is not None, "keys of media have slots of their own"
        return SlotMapping(
            self.blocks,
            self.keys % self.block_size,
            self.query_starts,
            tails=self.tails,
            kv_heads=self.spec.kv_heads,
            block_size=self.block_size,
        )

    @cached_property
    def _owners(self) -> Ints:
        """The sequence of each row, `[T]`."""
        return np.repeat(np.arange(self.sequences), self.counts)

    def by_row(self, of_sequences: Ints) -> Ints:
        """Repeat a number for each sequence, `[S]`, for each of its rows, `[T]`."""
        if self.rows == self.sequences:
            return of_sequences
        return of_sequences[self._owners]

    def ahead(self, spec: AttentionSpec, tokens: int) -> AttentionMetadata:
        """Return the metadata of queries so many tokens ahead of their rows: windows move on.

        Args:
            spec: the group's.
        """
        if not tokens or spec.sees_all:
            return self
        return replace(self, first_visible=spec.first_visible_each(self.keys + np.int32(tokens)))

    def part(self, start: int, end: int) -> AttentionMetadata:
        """Return the metadata of sequences `[start, end)`."""
        if (start, end) == (0, self.sequences):
            return self
        rows = slice(int(self.query_starts[start]), int(self.query_starts[end]))
        table = slice(int(self.table_starts[start]), int(self.table_starts[end]))
        return replace(
            self,
            query_starts=self.query_starts[start : end + 1] - rows.start,
            lengths=self.lengths[start:end],
            keys=self.keys[rows],
            first_visible=self.first_visible[rows],
            last_visible=self.last_visible[rows],
            table_starts=self.table_starts[start : end + 1] - table.start,
            block_table=self.block_table[table],
            first_blocks=self.first_blocks[start:end],
            blocks=None if self.blocks is None else self.blocks[rows],
            tails=None if self.tails is None else self.tails[start:end],
        )

    def split_at(self, length: int) -> AttentionMetadata:
        """Return the same rows with each sequence split after its first `length` keys.

        It needs sequences that see all keys. A row then belongs to the same part however its prompt
        is cut into chunks.
        """
        starts, first_keys = self.query_starts, self.keys[self.query_starts[:-1]]
        crossing = (first_keys < length) & (self.lengths > length)
        if not crossing.any():
            return self
        pieces = crossing + 1
        ends = np.cumsum(pieces)  # of each sequence among the pieces
        before = ends[crossing] - 2  # the first piece of those that are cut
        lengths = np.repeat(self.lengths, pieces)
        lengths[before] = length
        begins = np.repeat(starts[:-1], pieces)
        begins[before + 1] += length - first_keys[crossing]
        owners = np.repeat(np.arange(self.sequences), pieces)
        counts = -(-lengths // self.block_size) - self.first_blocks[owners]
        table_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        places = np.arange(table_starts[-1]) - np.repeat(table_starts[:-1], counts)
        return replace(
            self,
            query_starts=np.append(begins, starts[-1]).astype(np.int32),
            lengths=lengths,
            table_starts=table_starts,
            block_table=self.block_table[np.repeat(self.table_starts[owners], counts) + places],
            first_blocks=self.first_blocks[owners],
            tails=None if self.tails is None else self.tails[owners],
        )


def build_metadata(
    group: int,
    spec: AttentionSpec,
    rows: Sequence[AttentionRows],
    block_size: int,
    lists: RowLists | None = None,
) -> AttentionMetadata:
    """Return the metadata of sequences that have one format, in their order.

    Args:
        group: the KV group's index and spec.
        rows: one entry per sequence.
        lists: the lists of these rows, if made.
    """
    lists = lists or RowLists(rows)
    own = lists.of_group(group, spec, block_size)
    keys, query_starts = ints(lists.keys), ints(lists.query_starts)
    last_visible, tails = keys, None
    if spec.bidirectional_media:
        last_visible = _with_bidirectional_media(keys, rows, query_starts)
    if rows[0].format.has_tail:
        tails = np.array([each.tail_block(group) for each in rows], np.int32)
    return AttentionMetadata(
        spec=spec,
        format=rows[0].format,
        block_size=block_size,
        query_starts=query_starts,
        lengths=ints(lists.lengths),
        keys=keys,
        first_visible=ints(own.first_visible),
        last_visible=last_visible,
        table_starts=ints(own.table_starts),
        block_table=ints(own.block_table),
        first_blocks=ints(own.first_blocks),
        blocks=ints(lists.blocks(own, block_size)),
        tails=tails,
    )


def _with_bidirectional_media(
    keys: Ints, rows: Sequence[AttentionRows], query_starts: Ints
) -> Ints:
    """Return the last key that each row sees: its own, or the last of its image."""
    last = keys
    for each, first_row in zip(rows, query_starts.tolist(), strict=False):
        stop = each.start + each.count
        for start, end in each.bidirectional:
            low, high = max(start, each.start), min(end, stop)
            if low < high:
                assert end <= stop or each.count == 1, "a chunk ends within an image"
                last = last.copy() if last is keys else last
                shift = first_row - each.start
                last[low + shift : high + shift] = min(end, stop) - 1
    return last
