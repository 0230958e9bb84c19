"""How the reference cuts a step's rows, so that gathering their blocks wastes little.

Sequences with one row are gathered in batches of like length; rows of a chunk are read together, a
tile at a time where blocks are packed. Key numbers are relative to the first block listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from quire.attention.metadata import AttentionMetadata
from quire.cache.formats.slots import head_rows
from quire.core.arrays import Ints

_SHORT_TABLE = 15
"""Block tables up to this long share one batch; longer ones share with those of like length."""

_SCORES = 1 << 18
"""Attention scores (rows * keys) of one head that a tile may hold: 1 MB, of which reading a prompt
from codes holds a few copies at a time."""


def length_class(blocks: int) -> int:
    """Single rows whose block tables have the same class are attended together."""
    return max(blocks, _SHORT_TABLE).bit_length()


def _bias(first: Ints, last: Ints, begin: int, end: int) -> mx.array:
    """Return keys `begin` to `end` as rows see them: 0 where visible, else minus infinity; float32.

    Computed on the device: made here, the biases of all tiles of a step would be in memory at once.
    """
    keys = mx.arange(begin, end)
    visible = (keys >= mx.array(first[:, None])) & (keys <= mx.array(last[:, None]))
    return mx.where(visible, 0.0, -mx.inf)


def chosen_bias(chosen: mx.array, keys: int) -> mx.array:
    """`[t, keys]`: 0 where rows chose a key, see `Scoring.chosen`, else minus infinity; float32."""
    hidden = mx.full((chosen.shape[0], keys + 1), -mx.inf)
    places = mx.where(chosen < 0, keys, chosen)
    return mx.put_along_axis(hidden, places, mx.zeros(places.shape), axis=-1)[:, :keys]


@dataclass(frozen=True)
class KeyPlaces:
    """The pool positions of each row's keys, one by one, for layers of one head that see all keys.

    Attributes:
        table: block ids of all sequences.
        starts: `[T]` where the table of each row's sequence begins.
    """

    table: mx.array
    starts: mx.array
    block_size: int

    @staticmethod
    def of(metadata: AttentionMetadata) -> KeyPlaces:
        assert metadata.spec.sees_all, "an indexer chooses among all keys"
        starts = np.repeat(metadata.table_starts[:-1], metadata.counts)
        return KeyPlaces(mx.array(metadata.block_table), mx.array(starts), metadata.block_size)

    def find(self, rows: slice, keys: mx.array) -> tuple[mx.array, mx.array]:
        """Return the blocks of keys `[t, K]` of some rows, and the places within."""
        blocks = self.table[self.starts[rows, None] + keys // self.block_size]
        return blocks, keys % self.block_size


@dataclass
class RowKeys:
    """The visible keys among those gathered for rows.

    Attributes:
        there: `[t, K]`.
    """

    there: mx.array
    kv_heads: int = 1

    @property
    def mask(self) -> mx.array:
        """`[t, 1, 1, K]`, true where there is a key."""
        return self.there[:, None, None]

    @property
    def bias(self) -> mx.array:
        """`mask` as what is added to scores: 0 where there is a key, else minus infinity."""
        return mx.where(self.mask, 0.0, -mx.inf)


@dataclass
class DecodeBatch:
    """Sequences with one row each, whose block tables have similar lengths.

    Attributes:
        rows: where they are among the metadata's.
        blocks: `[B, P]` block ids, padded with block 0.
        first, last: `[B]` the visible keys, inclusive; `last` is the row's own.
        tails: `[B]` the tail block that holds the row's own block as written, if there are tails.
    """

    rows: slice
    blocks: Ints
    first: Ints
    last: Ints
    kv_heads: int
    block_size: int
    tails: Ints | None = None

    @cached_property
    def heads(self) -> mx.array:
        """`[B, kv_heads, P]` rows of the pool's arrays."""
        return mx.array(head_rows(self.blocks, self.kv_heads))

    @cached_property
    def mask(self) -> mx.array:
        """`[B, 1, 1, P * block_size]`, true where visible."""
        keys = np.arange(self.blocks.shape[1] * self.block_size, dtype=np.int32)
        visible = (keys >= self.first[:, None]) & (keys <= self.last[:, None])
        return mx.array(visible[:, None, None, :])

    @cached_property
    def bias(self) -> mx.array:
        """`mask` as what is added to scores: 0 where visible, else minus infinity; float32."""
        return mx.where(self.mask, 0.0, -mx.inf)

    @cached_property
    def tail_heads(self) -> mx.array:
        """`[B, kv_heads]` rows of the tail pool's arrays."""
        assert self.tails is not None, "the format has no tails"
        return mx.array(head_rows(self.tails[:, None], self.kv_heads)[..., 0])

    @cached_property
    def full_heads(self) -> mx.array | None:
        """`[B, kv_heads, P]` rows of the blocks before the rows' own; None where there are none."""
        count = int(self.last.max()) // self.block_size
        return mx.array(head_rows(self.blocks[:, :count], self.kv_heads)) if count else None

    @cached_property
    def tail_bias(self) -> mx.array:
        """0 where visible, else minus infinity; float32 `[B, 1, 1, (P + 1) * block_size]`.

        The keys of `full_heads` come first, then those of the row's own block.
        """
        start = self._own_starts
        full = np.arange(int(start.max()), dtype=np.int32)
        before = (full >= self.first[:, None]) & (full < start[:, None])
        own = self._own_keys
        here = (own >= self.first[:, None]) & (own <= self.last[:, None])
        visible = np.concatenate([before, here], axis=1)[:, None, None, :]
        return mx.where(mx.array(visible), 0.0, -mx.inf)

    @property
    def _own_starts(self) -> Ints:
        """`[B]` the first key of each row's own block."""
        return (self.last // self.block_size * self.block_size).astype(np.int32)

    @property
    def _own_keys(self) -> Ints:
        """`[B, block_size]` the keys of each row's own block."""
        places = np.arange(self.block_size, dtype=np.int32)
        return np.add(self._own_starts[:, None], places, dtype=np.int32)

    def chosen_bias(self, chosen: mx.array, *, tails: bool) -> mx.array:
        """Return the mask of the chosen keys, to be added to `bias` or to `tail_bias`."""
        seen = self.blocks.shape[1] * self.block_size
        bias = chosen_bias(chosen, seen)
        if tails:
            own = mx.take_along_axis(bias, mx.array(self._own_keys), axis=-1)
            bias = mx.concatenate([bias[:, : int(self._own_starts.max())], own], axis=-1)
        return bias[:, None, None]


@dataclass
class Chunk:
    """Consecutive tokens of one sequence.

    Attributes:
        rows: where they are among the metadata's.
        blocks: `[P]` ids of the blocks from the first visible key on.
        own: `[t]` each row's own key.
        first, last: `[t]` the visible keys of each row, inclusive; `last` is the row's own, or the
            end of the image that it belongs to, which is part of the chunk.
    """

    rows: slice
    blocks: Ints
    own: Ints
    first: Ints
    last: Ints
    kv_heads: int
    block_size: int

    @property
    def first_own(self) -> int:
        """The index in `blocks` of the first block that the chunk writes to."""
        return int(self.own[0]) // self.block_size

    @cached_property
    def heads(self) -> mx.array:
        """`[1, kv_heads, P]` rows of the pool's arrays."""
        return mx.array(head_rows(self.blocks, self.kv_heads)[None])

    @cached_property
    def causal(self) -> bool:
        """Whether each row sees everything up to itself, and nothing else."""
        return not self.first.any() and bool((self.last == self.own).all())

    @cached_property
    def mask(self) -> mx.array:
        """`[t, keys]` up to the last row's own key, true where visible."""
        keys = np.arange(int(self.last[-1]) + 1, dtype=np.int32)
        return mx.array((keys >= self.first[:, None]) & (keys <= self.last[:, None]))

    def bias(self, rows: slice, keys: int) -> mx.array:
        """`[t, keys]`: 0 where some rows see the first keys, else minus infinity; float32."""
        return _bias(self.first[rows], self.last[rows], 0, keys)

    def tiles(self) -> Iterator[Tile]:
        """Return the rows, a few at a time. No tile crosses the end of a block."""
        size, start = self.block_size, 0
        while start < len(self.own):
            block = int(self.own[start]) // size
            rows = slice(start, start + size - int(self.own[start]) % size)
            low = int(self.first[rows].min()) // size
            high = int(self.last[rows].max()) // size + 1
            most = max(1, _SCORES // ((high - low) * size))
            rows = slice(start, min(rows.stop, start + most, len(self.own)))
            first, last = self.first[rows], self.last[rows]
            yield Tile(rows, slice(low, high), block, first, last, size)
            start = rows.stop


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of a chunk that are scored at once; they all lie in one block.

    Attributes:
        rows: where they are in the chunk.
        blocks: those that any of them sees, as places in the chunk's.
        own: the rows' own block among the chunk's: the last of `blocks`, unless they belong to an
            image that goes on.
        first, last: the rows' visible keys, as in the chunk.
    """

    rows: slice
    blocks: slice
    own: int
    first: Ints
    last: Ints
    block_size: int

    @property
    def bias(self) -> mx.array:
        """`[t, P * block_size]`: 0 where visible, else minus infinity; float32."""
        return _bias(self.first, self.last, *self._keys)

    def chosen_bias(self, chosen: mx.array) -> mx.array:
        """Return the mask of the chosen keys, to be added to `bias`, for all rows of the chunk."""
        begin, end = self._keys
        return chosen_bias(chosen[self.rows], end)[:, begin:]

    @property
    def _keys(self) -> tuple[int, int]:
        """The keys of its blocks."""
        return self.blocks.start * self.block_size, self.blocks.stop * self.block_size


def cut(metadata: AttentionMetadata) -> tuple[list[DecodeBatch], list[Chunk]]:
    """Return the rows of sequences with one row, and those of the others."""
    counts = metadata.counts.tolist()
    tables = metadata.table_starts.tolist()
    classes = [
        length_class(end - start) if count == 1 else 0
        for count, start, end in zip(counts, tables, tables[1:], strict=False)
    ]
    batches, chunks = [], []
    at = 0
    while at < len(counts):
        end = at + 1
        if not classes[at]:
            chunks.append(_chunk(metadata, at))
        else:
            while end < len(counts) and classes[end] == classes[at]:
                end += 1
            batches.append(_batch(metadata, at, end))
        at = end
    return batches, chunks


def _batch(metadata: AttentionMetadata, begin: int, end: int) -> DecodeBatch:
    """Return sequences `[begin, end)`, one row each."""
    size = metadata.block_size
    starts = metadata.table_starts[begin:end]
    lengths = metadata.table_starts[begin + 1 : end + 1] - starts
    width = int(lengths.max())
    first, stop = int(starts[0]), int(metadata.table_starts[end])
    if stop - first == width * (end - begin):
        blocks = metadata.block_table[first:stop].reshape(-1, width)
    else:
        places = np.arange(width, dtype=np.int32)
        listed = places < lengths[:, None]
        blocks = metadata.block_table[np.where(listed, starts[:, None] + places, 0)] * listed
    row = int(metadata.query_starts[begin])
    rows = slice(row, row + end - begin)
    base = metadata.first_blocks[begin:end] * size
    return DecodeBatch(
        rows=rows,
        blocks=blocks,
        first=metadata.first_visible[rows] - base,
        last=metadata.last_visible[rows] - base,
        kv_heads=metadata.spec.kv_heads,
        block_size=size,
        tails=None if metadata.tails is None else metadata.tails[begin:end],
    )


def _chunk(metadata: AttentionMetadata, number: int) -> Chunk:
    """Return the rows of one sequence."""
    rows = slice(*metadata.query_starts[number : number + 2].tolist())
    table = slice(*metadata.table_starts[number : number + 2].tolist())
    base = metadata.first_blocks[number] * metadata.block_size
    return Chunk(
        rows=rows,
        blocks=metadata.block_table[table],
        own=metadata.keys[rows] - base,
        first=metadata.first_visible[rows] - base,
        last=metadata.last_visible[rows] - base,
        kv_heads=metadata.spec.kv_heads,
        block_size=metadata.block_size,
    )
