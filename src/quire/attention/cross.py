"""Metadata of cross-attention: visible media for each row, and write positions of media keys and
values.

Media keys fill whole blocks of their own; the last block is padded with keys that no row sees.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.attention.metadata import AttentionMetadata
from quire.attention.rows import AttentionRows
from quire.cache.formats.slots import SlotMapping
from quire.cache.specs import CrossKV
from quire.core.arrays import Ints
from quire.core.media import CrossMedia


class CrossKeysRows(Protocol):
    """Media keys that some rows of one sequence attend to."""

    @property
    def rows(self) -> range:
        """The rows' token indices in the sequence."""
        ...

    @property
    def media(self) -> CrossMedia:
        """The media."""
        ...

    @property
    def tables(self) -> Mapping[int, Sequence[int]]:
        """Ids of the blocks with the keys, in order, by group."""
        ...

    @property
    def writes(self) -> bool:
        """Whether the step computes the keys and values."""
        ...


class CrossRows(AttentionRows, Protocol):
    """Consecutive tokens of one sequence in a step, and the media that they attend to."""

    @property
    def crossed(self) -> Sequence[CrossKeysRows]:
        """The media, in the order of the tokens. No token attends to two of them."""
        ...


@dataclass(frozen=True)
class CrossMetadata:
    """Rows of one KV group and one format that attend to media.

    Attributes:
        rows: `[R]` their indices among the step's rows.
        metadata: metadata of these rows; rows with the same media count as one sequence.
        slots: write positions of the keys that the step computes.
    """

    rows: Ints
    metadata: AttentionMetadata
    slots: SlotMapping


def build_cross(
    group: int, spec: CrossKV, rows: Sequence[CrossRows], block_size: int
) -> CrossMetadata | None:
    """Build the metadata of one format's sequences, in their order; None if none attends to media.

    Args:
        group: the KV group's index.
    """
    numbers: list[Ints] = []
    last: list[Ints] = []
    table, table_starts, lengths = array("i"), [0], []
    written = array("i")
    first = 0
    for each in rows:
        for crossed in each.crossed:
            tokens = np.arange(crossed.rows.start, crossed.rows.stop, dtype=np.int32)
            numbers.append(tokens + (first - each.start))
            last.append(_last_seen(tokens, crossed.media))
            table.extend(crossed.tables[group])
            table_starts.append(len(table))
            lengths.append(crossed.media.keys)
            if crossed.writes:
                written.extend(crossed.tables[group])
        first += each.count
    if not numbers:
        return None
    counts = [len(each) for each in numbers]
    seen = np.concatenate(last)
    nothing = np.zeros_like(seen)
    metadata = AttentionMetadata(
        spec=spec,
        format=rows[0].format,
        block_size=block_size,
        query_starts=np.array([0, *np.cumsum(counts)], np.int32),
        lengths=np.array(lengths, np.int32),
        keys=nothing,
        first_visible=nothing,
        last_visible=seen,
        table_starts=np.array(table_starts, np.int32),
        block_table=np.array(table, np.int32),
        first_blocks=np.zeros(len(counts), np.int32),
        blocks=None,
        tails=None,
    )
    return CrossMetadata(
        np.concatenate(numbers), metadata, _whole_blocks(written, spec, block_size)
    )


def _last_seen(tokens: Ints, media: CrossMedia) -> Ints:
    """Return the last key that each token sees."""
    firsts, keys = np.array(media.visible, np.int32).T
    found: Ints = keys[np.searchsorted(firsts, tokens, side="right") - 1] - 1
    return found


def _whole_blocks(written: array[int], spec: CrossKV, block_size: int) -> SlotMapping:
    """Return the keys padded to whole blocks, consecutively."""
    blocks = np.repeat(np.array(written, np.int32), block_size)
    offsets = np.tile(np.arange(block_size, dtype=np.int32), len(written))
    starts = np.array([0, len(blocks)], np.int32)
    return SlotMapping(
        blocks, offsets, starts, tails=None, kv_heads=spec.kv_heads, block_size=block_size
    )
