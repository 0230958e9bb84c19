"""Several rows of a sequence over coded blocks, which are decoded and read like plain ones.

If full blocks are coded, a row sees earlier blocks as codes, its own and later ones uncoded. So
decoded and uncoded blocks lie in one array of plain blocks, and the rows of each block have their
own block table.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from quire.attention.backend import Scoring
from quire.attention.metadata import AttentionMetadata
from quire.attention.paged import cuda
from quire.attention.paged.cuda import Launch, Shape
from quire.attention.paged.decoding import BlockDecoder
from quire.attention.paged.tiles import FEW_ROWS, cut
from quire.cache.formats.base import PackedStore, WrittenBlocks
from quire.core.arrays import Ints
from quire.device.cuda.driver import card


class TokenPrompts:
    """Sequences with many rows each over codes of single tokens. Made once for all layers.

    Args:
        metadata: metadata of these sequences alone.
    """

    def __init__(self, metadata: AttentionMetadata) -> None:
        self._decoder = BlockDecoder(metadata.block_table, metadata)
        blocks = np.arange(len(metadata.block_table), dtype=np.int32)
        self._decoded = replace(metadata, block_table=blocks)
        self._launch: Launch | None = None

    def attend(self, q: mx.array, store: PackedStore, scoring: Scoring, shape: Shape) -> mx.array:
        """Attend for rows `[T, heads, key_dim]`; return `[T, heads, value_dim]`."""
        if self._launch is None:
            (part,) = cut(self._decoded, 0, 1, rows_many=shape.rows(few=False))
            tiles, visible = mx.array(part.tiles), mx.array(part.visible)
            table = mx.array(self._decoded.block_table)
            self._launch = Launch(tiles, table, visible, count=len(part.tiles), few=False, splits=1)
        keys, values = self._decoder.blocks(store, written=None, dtype=q.dtype)
        return cuda.attend(q, keys, values, launch=self._launch, scoring=scoring, shape=shape)


class CodedPrompts:
    """Sequences with several rows each; shared data is made once for all layers.

    Args:
        metadata: metadata of these sequences alone.
    """

    def __init__(self, metadata: AttentionMetadata) -> None:
        ids, self._by_block = side_by_side(metadata)
        self._decoder = BlockDecoder(ids, metadata)
        self._few = int(metadata.counts.max()) <= FEW_ROWS
        self._table = mx.array(self._by_block.block_table)
        self._launches: list[tuple[slice, Launch]] = []

    def attend(
        self,
        q: mx.array,
        store: PackedStore,
        written: WrittenBlocks,
        scoring: Scoring,
        shape: Shape,
    ) -> mx.array:
        """Attend for rows `[T, heads, key_dim]`; return `[T, heads, value_dim]`.

        Args:
            written: blocks written by these sequences.
        """
        blocks = self._decoder.blocks(store, written, q.dtype)
        if not self._launches:
            self._launches = self._cut(shape)
        outs = [
            cuda.attend(q[rows], *blocks, launch=launch, scoring=scoring, shape=shape)
            for rows, launch in self._launches
        ]
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    def _cut(self, shape: Shape) -> list[tuple[slice, Launch]]:
        few, many = shape.rows(few=True), shape.rows(few=False)
        launches = []
        for part in cut(self._by_block, FEW_ROWS if self._few else 0, few, rows_many=many):
            count = len(part.tiles)
            splits = shape.splits(count, card()) if part.few else 1
            tiles, visible = mx.array(part.tiles), mx.array(part.visible)
            launch = Launch(tiles, self._table, visible, count=count, few=part.few, splits=splits)
            launches.append((part.rows, launch))
        return launches


def side_by_side(metadata: AttentionMetadata) -> tuple[Ints, AttentionMetadata]:
    """Return key positions and metadata for rows whose keys are decoded blocks followed by tails.

    Returns:
        The ids of the blocks to decode, and the rows' metadata with the rows of one block as a
        sequence. Its block table counts the decoded blocks, then those that each sequence wrote.
    """
    starts, first_blocks = metadata.query_starts, metadata.first_blocks
    own = metadata.keys // metadata.block_size
    fresh, last = own[starts[:-1]], own[starts[1:] - 1]  # the blocks that each writes, inclusive
    before, wrote = last - first_blocks, last + 1 - fresh
    decoded, written = starts_of(before), starts_of(wrote) + before.sum()

    owner, number = each_of(wrote)  # of every block that is written
    block = fresh[owner] + number
    reached = block * metadata.block_size - metadata.keys[starts[owner]]
    bounds = np.append(starts[owner] + np.maximum(reached, 0), metadata.rows).astype(np.int32)

    # Its rows' table: the blocks before it as codes, and from it on as written.
    lengths = np.stack([block - first_blocks[owner], last[owner] + 1 - block], axis=1)
    entries = lengths.sum(axis=1)
    ids = np.stack([decoded[owner], written[owner] + number], axis=1)  # where these start
    shifts = ids.reshape(-1) - starts_of(lengths.reshape(-1))
    table = np.arange(entries.sum()) + np.repeat(shifts, lengths.reshape(-1))
    by_block = replace(
        metadata,
        query_starts=bounds,
        lengths=metadata.keys[bounds[1:] - 1] + 1,
        table_starts=np.append(0, np.cumsum(entries)).astype(np.int32),
        block_table=table.astype(np.int32),
        first_blocks=first_blocks[owner],
        tails=None,
    )
    sequence, place = each_of(before)
    return metadata.block_table[metadata.table_starts[sequence] + place], by_block


def starts_of(counts: Ints) -> Ints:
    """Return the first index of each of some consecutive runs, given their lengths."""
    return (np.cumsum(counts) - counts).astype(np.int32)


def each_of(counts: Ints) -> tuple[Ints, Ints]:
    """Return, for every entry of consecutive runs, its run and its index within the run."""
    run = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return run, np.arange(len(run), dtype=np.int32) - starts_of(counts)[run]
