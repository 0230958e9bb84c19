"""Several rows of a sequence over blocks that are coded when they are full: read like plain ones.

A row sees the blocks before its own as codes, its own and those that follow as written. So what the
codes stand for and what was written stand side by side in one array of plain blocks, and the rows
of each block have a block table of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from quire.attention.backend import Scoring
from quire.attention.metadata import AttentionMetadata
from quire.attention.paged import cuda
from quire.attention.paged.cuda import Launch, Shape
from quire.attention.paged.tiles import FEW_ROWS, cut
from quire.cache.formats.base import PackedStore, WrittenBlocks
from quire.cache.formats.paging import block_rows
from quire.cache.specs import Ints

_ELEMENTS = 1 << 24
"""Of keys, and of values, that are decoded at once: 64 MB in float32, of which a few copies are in
memory; what is kept has the queries' type."""


class CodedPrompts:
    """Sequences with several rows each; what their layers share is made once.

    Args:
        metadata: of these sequences alone.
    """

    def __init__(self, metadata: AttentionMetadata) -> None:
        ids, self._by_block = side_by_side(metadata)
        rows, spec = block_rows(ids, metadata.spec.kv_heads)[:, None], metadata.spec
        vector = max(spec.head_dim, spec.value_dim)
        some = max(1, _ELEMENTS // (metadata.block_tokens * vector))
        self._rows = [rows[start : start + some] for start in range(0, rows.shape[0], some)]
        self._few = int(metadata.counts.max()) <= FEW_ROWS
        self._table = mx.array(self._by_block.block_table)
        self._launches: list[tuple[slice, Launch]] = []

    def attend(
        self,
        q: mx.array,
        store: PackedStore,
        written: Sequence[WrittenBlocks],
        scoring: Scoring,
        shape: Shape,
    ) -> mx.array:
        """Rows `[T, heads, key_dim]`: `[T, heads, value_dim]`.

        Args:
            written: by each sequence.
        """
        keys: list[mx.array] = []  # [n, block_tokens, head_dim] each
        values: list[mx.array] = []
        for rows in self._rows:
            some = mx.depends([rows], keys[-1:] + values[-1:])[0]
            of_keys, of_values = store.read(some).decoded()
            keys.append(of_keys.astype(q.dtype))
            values.append(of_values.astype(q.dtype))
        keys += [each.keys.flatten(0, 1) for each in written]
        values += [each.values.flatten(0, 1) for each in written]
        blocks = mx.concatenate(keys), mx.concatenate(values)
        if not self._launches:
            self._launches = self._cut(shape)
        outs = [
            cuda.attend(q[rows], *blocks, launch, scoring, shape) for rows, launch in self._launches
        ]
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    def _cut(self, shape: Shape) -> list[tuple[slice, Launch]]:
        few, many = shape.rows(few=True), shape.rows(few=False)
        launches = []
        for part in cut(self._by_block, FEW_ROWS if self._few else 0, few, many):
            count = len(part.tiles)
            splits = shape.splits(count) if part.few else 1
            tiles, visible = mx.array(part.tiles), mx.array(part.visible)
            launch = Launch(tiles, self._table, visible, count, part.few, splits)
            launches.append((part.rows, launch))
        return launches


def side_by_side(metadata: AttentionMetadata) -> tuple[Ints, AttentionMetadata]:
    """Where rows find their keys once codes are decoded and what was written stands behind that.

    Returns:
        The ids of the blocks to decode, and the rows' metadata with the rows of one block as a
        sequence. Its block table counts the decoded blocks, then those that each sequence wrote.
    """
    size = metadata.block_tokens
    starts = metadata.query_starts
    own = [metadata.keys[starts[s] : starts[s + 1]] // size for s in range(metadata.sequences)]
    before = [int(each[-1] - first) for each, first in zip(own, metadata.first_blocks, strict=True)]
    ids = [
        metadata.block_table[start : start + count]
        for start, count in zip(metadata.table_starts[:-1], before, strict=True)
    ]
    decoded, written = 0, sum(before)
    tables: list[Ints] = []
    bounds: list[int] = []
    lowest: list[int] = []
    for blocks, first, count, row in zip(
        own, metadata.first_blocks.tolist(), before, starts.tolist(), strict=False
    ):
        fresh, last = int(blocks[0]), int(blocks[-1])
        listed = np.arange(first, last + 1, dtype=np.int32)
        for block in range(fresh, last + 1):
            as_code, as_written = listed - first + decoded, listed - fresh + written
            tables.append(np.where(listed < block, as_code, as_written))
            bounds.append(row + int(np.searchsorted(blocks, block)))
            lowest.append(first)
        decoded, written = decoded + count, written + last + 1 - fresh
    ends = [*bounds[1:], metadata.rows]
    by_block = replace(
        metadata,
        query_starts=np.array([*bounds, metadata.rows], np.int32),
        lengths=metadata.keys[np.array(ends) - 1] + 1,
        table_starts=np.cumsum([0, *map(len, tables)]).astype(np.int32),
        block_table=np.concatenate(tables),
        first_blocks=np.array(lowest, np.int32),
        tails=None,
    )
    return np.concatenate(ids), by_block
