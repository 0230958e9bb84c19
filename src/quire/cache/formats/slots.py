"""Write positions of a step's keys and values: flat arrays, shared by a KV group's layers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from quire.cache.formats.paging import block_rows, first_numbers
from quire.core.arrays import Ints
from quire.device.coding import ChunkBlocks
from quire.device.dtypes import from_host

_FEW = 32
"""Most blocks whose rows lists give sooner than arrays."""


def head_rows(blocks: Ints, kv_heads: int) -> Ints:
    """Convert block ids `[..., P]` to rows of a pool's arrays, `[..., kv_heads, P]`.

    A pool of plain blocks is `[blocks * kv_heads, block_size, head_dim]`: one head of one block is
    contiguous.
    """
    heads = first_numbers(kv_heads)[:, None]
    return (blocks[..., None, :] * kv_heads + heads).astype(np.int32, copy=False)


def _rows_by_head(blocks: Ints, kv_heads: int) -> mx.array:
    """Convert block ids `[n]` to rows of a pool's arrays, `[n, kv_heads]`."""
    if len(blocks) > _FEW:
        return from_host(head_rows(blocks[:, None], kv_heads)[..., 0])
    heads = range(kv_heads)
    rows = array("i", [block * kv_heads + head for block in blocks.tolist() for head in heads])
    return from_host(np.frombuffer(rows, np.int32).reshape(-1, kv_heads))


@dataclass(frozen=True)
class SlotMapping:
    """The write positions of the T rows of one KV group and format, sequence after sequence.

    Attributes:
        blocks, offsets: `[T]` each row's block, and its offset within it.
        query_starts: `[S + 1]`; rows `[query_starts[s], query_starts[s + 1])` are sequence s's.
        tails: `[S]` the tail block of each sequence, in formats that have one. Also None if all
            written blocks are written whole.
    """

    blocks: Ints
    offsets: Ints
    query_starts: Ints
    tails: Ints | None
    kv_heads: int
    block_size: int

    @cached_property
    def head_rows(self) -> mx.array:
        """Rows of the pool's arrays, `[T, kv_heads]`."""
        return _rows_by_head(self.blocks, self.kv_heads)

    @cached_property
    def head_offsets(self) -> mx.array:
        """Offsets within a block, `[T, 1]`."""
        return from_host(self.offsets[:, None])

    @cached_property
    def whole_rows(self) -> mx.array:
        """Rows of the pool's arrays `[blocks * kv_heads]`, if whole blocks are written."""
        return block_rows(self.blocks[:: self.block_size], self.kv_heads)

    @cached_property
    def singles(self) -> TailRows | None:
        """Sequences with one row, if the format has tails and there are any."""
        if self.tails is None:
            return None
        if self._only_singles:
            return TailRows(slice(0, len(self.tails)), self.tails, self, every=True)
        numbers = np.flatnonzero(np.diff(self.query_starts) == 1)
        if not len(numbers):
            return None
        return TailRows(_as_slice(self.query_starts[numbers]), self.tails[numbers], self)

    @cached_property
    def chunks(self) -> ChunkPlaces | None:
        """Sequences with several rows, if the format has tails and there are any."""
        if self.tails is None or self._only_singles:
            return None
        several = np.flatnonzero(np.diff(self.query_starts) > 1)
        return ChunkPlaces(several.astype(np.int32), self.tails, self)

    @property
    def _only_singles(self) -> bool:
        return len(self.blocks) == len(self.query_starts) - 1


def _as_slice(numbers: Ints) -> slice | Ints:
    """Return ascending rows; as a slice if they are contiguous."""
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else numbers


@dataclass(frozen=True)
class TailRows:
    """Rows that each add one token to their sequence's tail.

    Attributes:
        numbers: `[n]` their indices among the mapping's rows.
        tails: `[n]` the tail blocks.
        every: whether these are all the rows of the mapping.
    """

    numbers: slice | Ints
    tails: Ints
    slots: SlotMapping
    every: bool = False

    def of(self, vectors: mx.array) -> mx.array:
        """Return these rows of `[T, ...]`."""
        return vectors if self.every else vectors[self._rows]

    @cached_property
    def _rows(self) -> slice | mx.array:
        return self.numbers if isinstance(self.numbers, slice) else from_host(self.numbers)

    @cached_property
    def head_rows(self) -> mx.array:
        """Rows of the tail pool's arrays, `[n, kv_heads]`."""
        return _rows_by_head(self.tails, self.slots.kv_heads)

    @cached_property
    def head_offsets(self) -> mx.array:
        """Offsets within the tails, `[n, 1]`."""
        slots = self.slots
        return slots.head_offsets if self.every else from_host(slots.offsets[self.numbers, None])

    @cached_property
    def filled(self) -> tuple[mx.array, mx.array] | None:
        """Return the tails that these rows fill; None if there are none.

        Returns:
            Their rows in the tail pool's arrays, and their new rows in the pool's; `[m * kv_heads]`
            each.
        """
        slots = self.slots
        last = slots.block_size - 1
        # In most steps there are few rows, and none of them fills a tail: cheaper than numpy.
        full = [n for n, at in enumerate(slots.offsets[self.numbers].tolist()) if at == last]
        if not full:
            return None
        blocks = slots.blocks[self.numbers][full]
        return block_rows(self.tails[full], slots.kv_heads), block_rows(blocks, slots.kv_heads)


@dataclass(frozen=True)
class ChunkPlaces:
    """Blocks and tails of consecutive tokens of sequences, in formats with tails. Made once for all
    layers.

    Attributes:
        numbers: `[n]` indices of their sequences in the mapping.
        tails: `[S]` the tail block of each sequence of the mapping.
    """

    numbers: Ints
    tails: Ints
    slots: SlotMapping

    @cached_property
    def blocks(self) -> ChunkBlocks:
        """The blocks that the chunks write to."""
        slots, numbers = self.slots, self.numbers
        rows, counts = slots.query_starts[numbers], np.diff(slots.query_starts)[numbers]
        offsets = slots.offsets[rows]
        return ChunkBlocks.of(
            rows, counts, self.tails[numbers], offsets=offsets, block_size=slots.block_size
        )

    @cached_property
    def full(self) -> slice | mx.array | None:
        """Return the full ones of `blocks` from arrays `[n, ...]`; None if there are none."""
        full = self.blocks.full
        return _taking(full) if len(full) else None

    @cached_property
    def full_rows(self) -> mx.array:
        """Rows of the pool's arrays for full blocks, `[full * kv_heads]`."""
        blocks = self.blocks
        fresh = (blocks.rows + blocks.tail_tokens)[blocks.full]
        return block_rows(self.slots.blocks[fresh], self.slots.kv_heads)

    @cached_property
    def last(self) -> slice | mx.array:
        """Return the last block of each chunk from arrays `[n, ...]`."""
        return _taking(self.blocks.starts[1:] - 1)

    @cached_property
    def tail_rows(self) -> mx.array:
        """Rows of the tail pool's arrays, `[chunks * kv_heads]`."""
        return block_rows(self.tails[self.numbers], self.slots.kv_heads)

    @cached_property
    def started_rows(self) -> mx.array | None:
        """Rows of the tail pool `[m * kv_heads]` of chunks that start within a block, if any."""
        blocks = self.blocks
        started = blocks.tails[blocks.tail_tokens > 0]
        return block_rows(started, self.slots.kv_heads) if len(started) else None

    @cached_property
    def sources(self) -> mx.array:
        """`[n, kv_heads, block_size]`: indices of the blocks' vectors.

        They index the concatenation of the mapping's vectors `[T * kv_heads]`, a vector of zeros
        for places after a chunk's end, and the vectors of tails that start blocks, `[m * kv_heads *
        block_size]`.
        """
        blocks, slots = self.blocks, self.slots
        size, heads = slots.block_size, slots.kv_heads
        zeros = len(slots.blocks) * heads
        token, head = np.arange(size), np.arange(heads)[:, None]
        fresh = (blocks.rows[:, None, None] + token) * heads + head
        number = np.cumsum(blocks.tail_tokens > 0) - 1  # among the tails that start blocks
        started = zeros + 1 + (number[:, None, None] * heads + head) * size + token
        found = np.where(token < blocks.tail_tokens[:, None, None], started, fresh)
        found = np.where(token < blocks.ends[:, None, None], found, zeros)
        return from_host(found.astype(np.int32))


def _taking(numbers: Ints) -> slice | mx.array:
    """Take ascending rows, without a copy if they are contiguous."""
    rows = _as_slice(numbers)
    return rows if isinstance(rows, slice) else from_host(rows)
