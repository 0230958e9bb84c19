"""Divides a step's rows so that gathering their blocks wastes little.

Sequences with one row are gathered in batches of similar length, and of a bounded size. Rows of a
chunk are read together, or tile by tile if blocks are packed. Keys are numbered from the first
block listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from quire.attention.metadata import AttentionMetadata
from quire.attention.rows import AttentionRows
from quire.cache.formats.slots import head_rows
from quire.core.arrays import Ints
from quire.device.device import current_device
from quire.device.dtypes import from_host

_SHORT_TABLE = 15
"""Block tables up to this length share one batch; longer ones are batched by similar length."""

_SCORES = 1 << 18
"""Most attention scores (rows * keys) of one head in a tile: 1 MB. Reading a prompt from codes
holds a few copies at a time.
"""


Rows = TypeVar("Rows", bound=AttentionRows)


@cache
def length_class(blocks: int) -> int:
    """Return the class of a block table's length. Single rows of one class are attended
    together.
    """
    return max(blocks, _SHORT_TABLE).bit_length()


def in_preferred_order(rows: Sequence[Rows], block_size: int) -> list[Rows]:
    """Sort the sequences of a step: single rows first, similar block table lengths together.

    Any order is correct. This one gives backends few batches.
    """
    single = [each for each in rows if each.count == 1]
    classes = [length_class((each.start + 1) // block_size + 1) for each in single]
    if len(set(classes)) > 1:
        order = sorted(range(len(single)), key=classes.__getitem__)
        single = [single[number] for number in order]
    return single + [each for each in rows if each.count > 1]


def _bias(first: Ints, last: Ints, start: int, end: int) -> mx.array:
    """Return a mask of keys `start` to `end` for rows: 0 if visible, else minus infinity; float32.

    It is computed on the device, because masks of all tiles of a step would fill the memory.
    """
    keys = mx.arange(start, end)
    visible = (keys >= from_host(first[:, None])) & (keys <= from_host(last[:, None]))
    return mx.where(visible, 0.0, -mx.inf)


def _to_add(visible: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """Return a mask to add to scores: 0 if visible, else minus infinity."""
    return np.where(visible, np.float32(0), np.float32(-np.inf))


def chosen_bias(chosen: mx.array, keys: int) -> mx.array:
    """Return a mask `[t, keys]`: 0 if the row chose the key (see `Scoring.chosen`), else minus
    infinity; float32.
    """
    hidden = mx.full((chosen.shape[0], keys + 1), -mx.inf)
    places = mx.where(chosen < 0, keys, chosen)
    return mx.put_along_axis(hidden, places, mx.zeros(places.shape), axis=-1)[:, :keys]


@dataclass(frozen=True)
class KeyPlaces:
    """Pool positions of single keys, for layers with one head whose rows see all keys.

    Attributes:
        table: block ids of all sequences.
        starts: `[T]` start of each row's sequence in the table.
    """

    table: mx.array
    starts: mx.array
    block_size: int

    @staticmethod
    def of(metadata: AttentionMetadata) -> KeyPlaces:
        assert metadata.spec.sees_all, "an indexer chooses among all keys"
        starts = np.repeat(metadata.table_starts[:-1], metadata.counts)
        return KeyPlaces(from_host(metadata.block_table), from_host(starts), metadata.block_size)

    def find(self, rows: slice, keys: mx.array) -> tuple[mx.array, mx.array]:
        """Return the blocks of keys `[t, K]` of some rows, and the offsets within."""
        blocks = self.table[self.starts[rows, None] + keys // self.block_size]
        return blocks, keys % self.block_size


@dataclass
class RowKeys:
    """The visible keys among those gathered for rows.

    Attributes:
        there: `[t, K]` whether there is a key.
    """

    there: mx.array

    @property
    def mask(self) -> mx.array:
        """Mask `[t, 1, 1, K]`, true if there is a key."""
        return self.there[:, None, None]

    @property
    def bias(self) -> mx.array:
        """Mask to add to scores: 0 if there is a key, else minus infinity."""
        return mx.where(self.mask, 0.0, -mx.inf)


@dataclass
class DecodeBatch:
    """Sequences with one row each, whose block tables have similar lengths.

    Attributes:
        rows: their indices among the metadata's rows.
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
        """Rows of the pool's arrays, `[B, kv_heads, P]`."""
        return from_host(head_rows(self.blocks, self.kv_heads))

    @property
    def _visible(self) -> npt.NDArray[np.bool_]:
        """Whether each row sees each key, `[B, 1, 1, P * block_size]`."""
        keys = np.arange(self.blocks.shape[1] * self.block_size, dtype=np.int32)
        visible = (keys >= self.first[:, None]) & (keys <= self.last[:, None])
        return visible[:, None, None, :]

    @cached_property
    def mask(self) -> mx.array:
        """Mask `[B, 1, 1, P * block_size]`, true if visible."""
        return from_host(self._visible)

    @cached_property
    def bias(self) -> mx.array:
        """Mask to add to scores: 0 if visible, else minus infinity; float32."""
        return from_host(_to_add(self._visible))

    @cached_property
    def tail_heads(self) -> mx.array:
        """Rows of the tail pool's arrays, `[B, kv_heads]`."""
        assert self.tails is not None, "the format has no tails"
        return from_host(head_rows(self.tails[:, None], self.kv_heads)[..., 0])

    @cached_property
    def full_heads(self) -> mx.array | None:
        """Rows of the blocks before the rows' own, `[B, kv_heads, P]`; None if there are none."""
        count = int(self.last.max()) // self.block_size
        return from_host(head_rows(self.blocks[:, :count], self.kv_heads)) if count else None

    @cached_property
    def tail_bias(self) -> mx.array:
        """Mask to add to scores, float32 `[B, 1, 1, (P + 1) * block_size]`: 0 if visible.

        Keys of `full_heads` come first, then those of the row's own block.
        """
        start = self._own_starts
        full = np.arange(int(start.max()), dtype=np.int32)
        before = (full >= self.first[:, None]) & (full < start[:, None])
        own = self._own_keys
        here = (own >= self.first[:, None]) & (own <= self.last[:, None])
        visible = np.concatenate([before, here], axis=1)[:, None, None, :]
        return from_host(_to_add(visible))

    @property
    def _own_starts(self) -> Ints:
        """First key of each row's own block, `[B]`."""
        return (self.last // self.block_size * self.block_size).astype(np.int32)

    @property
    def _own_keys(self) -> Ints:
        """Keys of each row's own block, `[B, block_size]`."""
        places = np.arange(self.block_size, dtype=np.int32)
        return np.add(self._own_starts[:, None], places, dtype=np.int32)

    def chosen_bias(self, chosen: mx.array, *, tails: bool) -> mx.array:
        """Return the mask of the chosen keys, to add to `bias` or `tail_bias`."""
        seen = self.blocks.shape[1] * self.block_size
        bias = chosen_bias(chosen, seen)
        if tails:
            own = mx.take_along_axis(bias, from_host(self._own_keys), axis=-1)
            bias = mx.concatenate([bias[:, : int(self._own_starts.max())], own], axis=-1)
        return bias[:, None, None]


@dataclass
class Chunk:
    """Consecutive tokens of one sequence.

    Attributes:
        rows: their range among the metadata's rows.
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
        """Index in `blocks` of the first block that the chunk writes to."""
        return int(self.own[0]) // self.block_size

    @cached_property
    def heads(self) -> mx.array:
        """Rows of the pool's arrays, `[1, kv_heads, P]`."""
        return from_host(head_rows(self.blocks, self.kv_heads)[None])

    @cached_property
    def causal(self) -> bool:
        """Whether each row sees exactly the keys up to itself."""
        return not self.first.any() and bool((self.last == self.own).all())

    @cached_property
    def mask(self) -> mx.array:
        """Mask `[t, keys]` up to the last row's own key, true if visible."""
        keys = np.arange(int(self.last[-1]) + 1, dtype=np.int32)
        return from_host((keys >= self.first[:, None]) & (keys <= self.last[:, None]))

    def bias(self, rows: slice, keys: int) -> mx.array:
        """Return a mask `[t, keys]` of the first keys for some rows: 0 if visible, else minus
        infinity; float32.
        """
        return _bias(self.first[rows], self.last[rows], 0, end=keys)

    def tiles(self) -> Iterator[Tile]:
        """Yield the rows in tiles. No tile crosses the end of a block."""
        size, start = self.block_size, 0
        while start < len(self.own):
            block = int(self.own[start]) // size
            rows = slice(start, start + size - int(self.own[start]) % size)
            low = int(self.first[rows].min()) // size
            high = int(self.last[rows].max()) // size + 1
            most = max(1, _SCORES // ((high - low) * size))
            rows = slice(start, min(rows.stop, start + most, len(self.own)))
            first, last = self.first[rows], self.last[rows]
            yield Tile(rows, slice(low, high), block, first=first, last=last, block_size=size)
            start = rows.stop


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of a chunk that are scored at once; they all lie in one block.

    Attributes:
        rows: their range in the chunk.
        blocks: range of the chunk's blocks that any of them sees.
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
        """Mask `[t, P * block_size]`: 0 if visible, else minus infinity; float32."""
        return _bias(self.first, self.last, *self._keys)

    def chosen_bias(self, chosen: mx.array) -> mx.array:
        """Return the mask of the chosen keys of all rows of the chunk, to add to `bias`."""
        start, end = self._keys
        return chosen_bias(chosen[self.rows], end)[:, start:]

    @property
    def _keys(self) -> tuple[int, int]:
        """Range of the keys of its blocks."""
        return self.blocks.start * self.block_size, self.blocks.stop * self.block_size


def cut(metadata: AttentionMetadata) -> tuple[list[DecodeBatch], list[Chunk]]:
    """Divide the rows into those of sequences with one row, and the others."""
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
            most = _most_rows(metadata, max(tables[at + 1] - tables[at], 1 << classes[at] - 1))
            while end < min(len(counts), at + most) and classes[end] == classes[at]:
                end += 1
            batches.append(_batch(metadata, at, end))
        at = end
    return batches, chunks


def _most_rows(metadata: AttentionMetadata, blocks: int) -> int:
    """Return how many rows a batch may hold that gathers so many blocks for each."""
    spec = metadata.spec
    token = spec.kv_heads * (spec.head_dim + spec.value_dim) * 4  # float32 at most
    return max(1, current_device().gathered_bytes // (blocks * metadata.block_size * token))


def _batch(metadata: AttentionMetadata, start: int, end: int) -> DecodeBatch:
    """Return the batch of sequences `[start, end)`, with one row each."""
    size = metadata.block_size
    starts = metadata.table_starts[start:end]
    lengths = metadata.table_starts[start + 1 : end + 1] - starts
    width = int(lengths.max())
    first, stop = int(starts[0]), int(metadata.table_starts[end])
    if stop - first == width * (end - start):
        blocks = metadata.block_table[first:stop].reshape(-1, width)
    else:
        places = np.arange(width, dtype=np.int32)
        listed = places < lengths[:, None]
        blocks = metadata.block_table[np.where(listed, starts[:, None] + places, 0)] * listed
    row = int(metadata.query_starts[start])
    rows = slice(row, row + end - start)
    base = metadata.first_blocks[start:end] * size
    return DecodeBatch(
        rows=rows,
        blocks=blocks,
        first=metadata.first_visible[rows] - base,
        last=metadata.last_visible[rows] - base,
        kv_heads=metadata.spec.kv_heads,
        block_size=size,
        tails=None if metadata.tails is None else metadata.tails[start:end],
    )


def _chunk(metadata: AttentionMetadata, number: int) -> Chunk:
    """Return the chunk of one sequence's rows."""
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
