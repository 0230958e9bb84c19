"""Lays out the rows of a step that read decoded blocks in a workspace, instead of codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.attention.metadata import AttentionMetadata
from quire.attention.paged.prompts import each_of, side_by_side, starts_of
from quire.attention.paged.tiles import FEW_ROWS, cut
from quire.attention.paged.tiling import Tiling
from quire.attention.rows import AttentionRows
from quire.core.arrays import Ints
from quire.executor.graphs.attention.workspaces import STREAMS
from quire.executor.graphs.records import StepRecord

WRITTEN_FIELDS = 5
"""Fields of a block that a step writes: its place in the workspace, the id of the block that gets
its codes or -1, its sequence's tail, how many of its tokens the tail holds already, and how many it
has after the step."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows of a step that read a workspace, which come behind those that read codes.

    Attributes:
        first: number of the first of them.
        ids: for each block of the workspace, the id of the block that is decoded there; below 0
            where the step writes it: -1, or -2 - n if it becomes tail n.
        written: `[n, WRITTEN_FIELDS]`; empty in formats that code each row at once.
        blocks: the workspace's block that each row is written to; None in these formats.
        metadata: of the rows, by the workspace's blocks.
    """

    first: int
    ids: Ints
    written: Ints
    blocks: Ints | None
    metadata: AttentionMetadata

    @staticmethod
    def of(metadata: AttentionMetadata) -> PromptRows | None:
        """Return the rows of a step, from the first sequence on that has many, that writes to two
        blocks, or whose rows are not among the first `STREAMS`; None without one.
        """
        start = _first_sequence(metadata)
        if start == metadata.sequences:
            return None
        first, own = int(metadata.query_starts[start]), metadata.part(start, metadata.sequences)
        if own.tails is not None:
            return _written_rows(first, own, own.tails)
        blocks = np.arange(len(own.block_table), dtype=np.int32)
        nothing = np.empty((0, WRITTEN_FIELDS), np.int32)
        decoded = replace(own, block_table=blocks)
        return PromptRows(first, own.block_table, nothing, blocks=None, metadata=decoded)

    @property
    def table(self) -> Ints:
        """Integers that follow the block tables: `ids`, then the workspace's block table."""
        return np.concatenate([self.ids, self.metadata.block_table])


def most_tiles(rows: Sequence[AttentionRows], block_size: int, tile_rows: int) -> int:
    """Return how many tiles the rows that read a workspace have at most; 0 if there are none.

    Args:
        rows: the sequences of a step, all of one format.
    """
    tiles = stop = 0
    for each in rows:
        stop += each.count
        last = each.start % block_size + each.count - 1
        blocks = last // block_size + 1 if each.format.has_tail else 1
        if tiles or blocks > 1 or each.count > FEW_ROWS or stop > STREAMS:
            tiles += blocks + each.count // tile_rows
    return tiles


def _first_sequence(metadata: AttentionMetadata) -> int:
    """Return the number of the first sequence that reads a workspace."""
    many = (metadata.counts > FEW_ROWS) | (metadata.query_starts[1:] > STREAMS)
    if metadata.tails is not None:
        own, starts = metadata.keys // metadata.block_size, metadata.query_starts
        many |= own[starts[:-1]] != own[starts[1:] - 1]
    return int(many.argmax()) if many.any() else metadata.sequences


def _written_rows(first: int, metadata: AttentionMetadata, tails: Ints) -> PromptRows:
    """Return the rows of sequences whose full blocks are coded behind the layer's products."""
    ids, by_block = side_by_side(metadata)
    size, starts = metadata.block_size, metadata.query_starts
    own = metadata.keys // size
    fresh = own[starts[:-1]]
    count = own[starts[1:] - 1] + 1 - fresh  # blocks that each sequence writes
    owner, number = each_of(count)
    block = fresh[owner] + number
    place = metadata.table_starts[owner] - metadata.first_blocks[owner] + block
    tokens = np.minimum(metadata.lengths[owner] - block * size, size)
    held = np.where(number == 0, metadata.keys[starts[owner]] % size, 0)
    written = np.stack(
        [
            len(ids) + np.arange(len(owner)),
            np.where(tokens == size, metadata.block_table[place], -1),
            tails[owner],
            held,
            tokens,
        ],
        axis=1,
    )
    last = number == count[owner] - 1
    blocks = metadata.by_row(len(ids) + starts_of(count) - fresh) + own
    return PromptRows(
        first,
        np.concatenate([ids, np.where(last, -2 - tails[owner], -1)]).astype(np.int32),
        written.astype(np.int32),
        blocks=blocks,
        metadata=by_block,
    )


def write_prompts(
    group: StepRecord,
    rows: PromptRows | None,
    entries: int,
    *,
    room: int,
    tiling: Tiling,
    max_rows: int,
) -> bool:
    """Write a KV group's rows that read a workspace into a step's inputs.

    Args:
        group: one record, by the fields of `GroupInputs`.
        entries: number of block table entries before `PromptRows.table`.
        room: blocks of the workspace.
        tiling: how rows are divided.
        max_rows: rows of the graph.

    Returns:
        False if they do not fit.
    """
    if rows is None:
        return True
    (part,) = cut(rows.metadata, 0, 1, rows_many=tiling.rows)
    count, written = len(part.tiles), len(rows.written)
    if len(rows.ids) > room or count > tiling.most_tiles(max_rows):
        return False
    shift = np.array([rows.first, 0, 0, 0, entries + len(rows.ids), 0], np.int32)
    found = tiling.shared(part.tiles + shift)
    group["prompts"][0, : len(found)] = found
    group["decoded"][0] = len(rows.ids), entries, written, 0
    group["written"][0, :written] = rows.written
    if rows.blocks is not None:
        group["tails"][0, rows.first : rows.first + len(rows.blocks)] = -1 - rows.blocks
    return True
