"""Where a step's new keys and values belong: flat arrays that all layers of a KV group share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from quire.cache.formats.paging import block_rows
from quire.cache.specs import Ints


def head_rows(blocks: Ints, kv_heads: int) -> Ints:
    """Block ids `[..., P]` to rows of a pool's arrays, `[..., kv_heads, P]`.

    A pool of plain blocks is `[blocks * kv_heads, block_tokens, head_dim]`: one head of one block
    is one run of memory.
    """
    heads = np.arange(kv_heads, dtype=np.int32)[:, None]
    return (blocks[..., None, :] * kv_heads + heads).astype(np.int32)


@dataclass(frozen=True)
class SlotMapping:
    """Where the T rows of one KV group and format are written, sequence after sequence.

    Attributes:
        blocks, offsets: `[T]` each row's block, and its place within it.
        query_starts: `[S + 1]`; rows `[query_starts[s], query_starts[s + 1])` are sequence s's.
        tails: `[S]` the tail block of each sequence, in formats that have one. None in these too
            where all blocks that are written are written whole.
    """

    blocks: Ints
    offsets: Ints
    query_starts: Ints
    tails: Ints | None
    kv_heads: int
    block_tokens: int

    @cached_property
    def head_rows(self) -> mx.array:
        """`[T, kv_heads]` rows of the pool's arrays."""
        return mx.array(head_rows(self.blocks[:, None], self.kv_heads)[..., 0])

    @cached_property
    def head_offsets(self) -> mx.array:
        """`[T, 1]` places within a block."""
        return mx.array(self.offsets[:, None])

    @cached_property
    def whole_rows(self) -> mx.array:
        """`[blocks * kv_heads]` rows of the pool's arrays, where whole blocks are written."""
        return block_rows(self.blocks[:: self.block_tokens], self.kv_heads)

    @cached_property
    def singles(self) -> TailRows | None:
        """The sequences with one row, if the format has tails and there are any."""
        if self.tails is None:
            return None
        if self._only_singles:
            return TailRows(slice(0, len(self.tails)), self.tails, self, every=True)
        numbers = np.flatnonzero(np.diff(self.query_starts) == 1)
        if not len(numbers):
            return None
        return TailRows(_as_slice(self.query_starts[numbers]), self.tails[numbers], self)

    @cached_property
    def chunks(self) -> list[ChunkPlace]:
        """The sequences with several rows, if the format has tails."""
        if self.tails is None or self._only_singles:
            return []
        starts = self.query_starts.tolist()
        spans = zip(starts, starts[1:], self.tails.tolist(), strict=False)
        return [ChunkPlace(a, b - a, tail, self) for a, b, tail in spans if b - a > 1]

    @property
    def _only_singles(self) -> bool:
        return len(self.blocks) == len(self.query_starts) - 1


def _as_slice(numbers: Ints) -> slice | Ints:
    """Rows in ascending order; as a slice where they are neighbours."""
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else numbers


@dataclass(frozen=True)
class TailRows:
    """Rows that each add one token to their sequence's tail.

    Attributes:
        numbers: which `[n]` rows of the mapping they are.
        tails: `[n]` the tail blocks.
        every: whether these are all the rows of the mapping.
    """

    numbers: slice | Ints
    tails: Ints
    slots: SlotMapping
    every: bool = False

    def of(self, vectors: mx.array) -> mx.array:
        """These rows of `[T, ...]`."""
        return vectors if self.every else vectors[self._rows]

    @cached_property
    def _rows(self) -> slice | mx.array:
        return self.numbers if isinstance(self.numbers, slice) else mx.array(self.numbers)

    @cached_property
    def head_rows(self) -> mx.array:
        """`[n, kv_heads]` rows of the tail pool's arrays."""
        return mx.array(head_rows(self.tails[:, None], self.slots.kv_heads)[..., 0])

    @cached_property
    def head_offsets(self) -> mx.array:
        """`[n, 1]` places within the tails."""
        slots = self.slots
        return slots.head_offsets if self.every else mx.array(slots.offsets[self.numbers, None])

    @cached_property
    def filled(self) -> tuple[mx.array, mx.array] | None:
        """The tails that these rows fill; None when there are none.

        Returns:
            Rows of the tail pool's arrays, and of the pool's where they go; `[m * kv_heads]` each.
        """
        slots = self.slots
        last = slots.block_tokens - 1
        # In most steps there are few rows, and none of them fills a tail: cheaper than numpy.
        full = [n for n, at in enumerate(slots.offsets[self.numbers].tolist()) if at == last]
        if not full:
            return None
        blocks = slots.blocks[self.numbers][full]
        return block_rows(self.tails[full], slots.kv_heads), block_rows(blocks, slots.kv_heads)


@dataclass(frozen=True)
class ChunkPlace:
    """Consecutive tokens of one sequence, in formats with tails.

    Attributes:
        start, count: its rows among the mapping's.
        tail: the sequence's tail block.
    """

    start: int
    count: int
    tail: int
    slots: SlotMapping

    @property
    def rows(self) -> slice:
        """Takes its rows from arrays `[T, ...]`."""
        return slice(self.start, self.start + self.count)

    @property
    def offset(self) -> int:
        """Tokens before the chunk in its first block."""
        return int(self.slots.offsets[self.start])

    @property
    def end(self) -> int:
        """Tokens up to the chunk's end, counted from the start of its first block."""
        return self.offset + self.count

    @property
    def blocks(self) -> int:
        """Blocks that the chunk writes to."""
        return -(-self.end // self.slots.block_tokens)

    @property
    def full_blocks(self) -> int:
        """Blocks that the chunk fills: the first ones of those."""
        return self.end // self.slots.block_tokens

    @cached_property
    def full_rows(self) -> mx.array:
        """`[full_blocks * kv_heads]` rows of the pool's arrays."""
        size, slots = self.slots.block_tokens, self.slots
        firsts = np.arange(self.full_blocks) * size - self.offset
        return block_rows(slots.blocks[self.rows][np.maximum(firsts, 0)], slots.kv_heads)

    @cached_property
    def tail_rows(self) -> mx.array:
        """`[kv_heads]` rows of the tail pool's arrays."""
        return block_rows(np.array([self.tail], np.int32), self.slots.kv_heads)
