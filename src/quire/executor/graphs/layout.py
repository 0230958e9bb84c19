"""Device buffers of a step's inputs. Their addresses are fixed, so recorded graphs stay valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from quire.attention.metadata import AttentionMetadata, build_metadata
from quire.attention.paged import packed
from quire.attention.paged.tiles import FEW_ROWS, TILE_FIELDS, cut
from quire.cache.specs import KVLayout
from quire.core.arrays import Ints
from quire.executor.graphs.states import StateInputs, write_states
from quire.scheduler.plan import ScheduledSequence
from quire.scheduler.positions import alike

_HEAD_INTS = 4
"""Integers before the positions: the number of rows, and padding."""
_GROUP_INTS = 29
"""Integers of each row in each group: see `GroupInputs`, and `StateInputs`, which needs fewer."""


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """A step's inputs for one KV group: addresses, or offsets among the inputs.

    Attributes:
        blocks, offsets: the slot that each row is written to.
        visible: the first and the last key that a row sees.
        tiles: tiles of plain blocks, one row each. Without the rows that `wide` covers.
        tails: for each row, its sequence's tail block, in formats with tails.
        coded, own: tiles of formats with tails; see `packed.tiles_of`.
        wide: tiles of several rows of one sequence, over plain blocks.
    """

    blocks: int
    offsets: int
    visible: int
    tiles: int
    tails: int
    coded: int
    own: int
    wide: int

    @staticmethod
    def of(start: int, each: int) -> GroupInputs:
        """Lay out the inputs from `start` on. `each` is the size of one field with a number for
        each row.
        """
        offsets = (0, 1, 2, 4, 10, 11, 17, 23)
        return GroupInputs(*(start + each * offset for offset in offsets))


class InputLayout:
    """Device memory for the inputs of steps of up to `max_rows` rows.

    Args:
        groups: KV groups.
        entries: the most block table entries of a step, all tables together.
        address: returns the device address of an array.
        tile_rows: for each group, the rows of a tile for sequences with many rows; empty if each
            row is a tile.
    """

    def __init__(
        self,
        groups: int,
        max_rows: int,
        entries: int,
        address: Callable[[mx.array], int],
        tile_rows: Sequence[int] = (),
    ) -> None:
        self.max_rows = max_rows
        self.tile_rows = tile_rows
        self.entries = entries
        start = table_start(max_rows, groups)
        self._memory = mx.zeros((max_rows + start + entries,), dtype=mx.int32)
        mx.eval(self._memory)
        self.tokens = address(self._memory)
        self.numbers = self.tokens + 4 * max_rows
        """Address of all inputs except tokens. The first is `rows`."""
        self.rows = self.numbers
        self.positions = self.numbers + 4 * _HEAD_INTS
        self.table = self.numbers + 4 * start

    def group(self, number: int) -> GroupInputs:
        """Return the addresses of a KV group's inputs."""
        start = self.numbers + 4 * group_start(self.max_rows, number)
        return GroupInputs.of(start, 4 * self.max_rows)

    def states(self, number: int) -> StateInputs:
        """Return the addresses of the inputs of a group of recurrent states."""
        start = self.numbers + 4 * group_start(self.max_rows, number)
        return StateInputs.of(start, 4 * self.max_rows)


def group_start(max_rows: int, number: int) -> int:
    """Return where a KV group begins among a step's int32 inputs."""
    return _HEAD_INTS + max_rows + _GROUP_INTS * max_rows * number


def table_start(max_rows: int, groups: int) -> int:
    """Return where the block tables begin among a step's int32 inputs."""
    return group_start(max_rows, groups)


def step_numbers(
    rows: Sequence[ScheduledSequence],
    layout: KVLayout,
    memory: InputLayout,
    block_size: int,
) -> Ints | None:
    """Return a step's inputs except its tokens, in the layout of `InputLayout`.

    None if the block tables are too long, if positions differ between axes or are no whole numbers,
    or if a state goes to too many slots.
    """
    max_rows = memory.max_rows
    start = table_start(max_rows, len(layout.groups))
    numbers = np.zeros(start, np.int32)
    numbers[0] = sum(each.count for each in rows)
    if not write_positions(numbers, rows):
        return None
    tables: list[Ints] = []
    entries = 0
    for number, group in enumerate(layout.groups):
        if group.spec.recurrent is not None:
            at = StateInputs.of(group_start(max_rows, number), max_rows)
            if not write_states(numbers, at, number, rows):
                return None
            continue
        spec = group.spec.attention
        assert spec is not None, "graphed layers attend or recur"
        metadata = build_metadata(number, spec, rows, block_size)
        tile_rows = memory.tile_rows[number] if memory.tile_rows else None
        write_group(numbers, number, metadata, entries, max_rows, tile_rows)
        tables.append(metadata.block_table)
        entries += len(metadata.block_table)
    return None if entries > memory.entries else np.concatenate([numbers, *tables])


def write_positions(numbers: Ints, rows: Sequence[ScheduledSequence]) -> bool:
    """Write each row's position into a step's inputs.

    Returns:
        False if a row's position differs between axes, or is no whole number.
    """
    found = [positions for each in rows if (positions := alike(each.positions)) is not None]
    if len(found) < len(rows):
        return False
    positions = np.concatenate(found)
    whole = positions.astype(np.int32)
    numbers[4 : 4 + len(positions)] = whole
    return bool((whole == positions).all())


def write_group(
    numbers: Ints,
    group: int,
    metadata: AttentionMetadata,
    entries: int,
    max_rows: int,
    tile_rows: int | None = None,
) -> None:
    """Write a KV group's inputs as `GroupInputs` lays them out.

    Args:
        entries: number of block table entries before this group's.
        tile_rows: see `InputLayout`; None if each row is a tile.
    """
    count, slots = metadata.rows, metadata.slots
    start = group_start(max_rows, group)
    at = GroupInputs.of(start, max_rows)
    numbers[at.blocks :][:count] = slots.blocks
    numbers[at.offsets :][:count] = slots.offsets
    first, last = metadata.first_visible, metadata.last_visible
    visible = numbers[at.visible :][: 2 * count].reshape(count, 2)
    visible[:, 0], visible[:, 1] = first, last
    if metadata.tails is not None:
        numbers[at.tails :][:count] = metadata.by_row(metadata.tails)
        coded, own = packed.tiles_of(metadata)
        coded[:, 4] += entries
        numbers[at.coded :][: coded.size] = coded.reshape(-1)
        numbers[at.own :][: own.size] = own.reshape(-1)
    tiles = numbers[at.tiles :][: TILE_FIELDS * count].reshape(count, TILE_FIELDS)
    tiles[:, 0] = np.arange(count)
    tiles[:, 1] = 1
    tiles[:, 2], tiles[:, 3] = first, last + 1
    places = metadata.table_starts[:-1] - metadata.first_blocks + entries
    fresh = metadata.keys[metadata.query_starts[:-1]]
    tiles[:, 4], tiles[:, 5] = metadata.by_row(places), metadata.by_row(fresh)
    if tile_rows is None:
        return
    found = 0
    for part in cut(metadata, FEW_ROWS, 1, tile_rows):
        if part.few:
            continue
        tiles[part.rows] = 0
        wide = numbers[at.wide + TILE_FIELDS * found :][: part.tiles.size]
        shift = np.array([part.rows.start, 0, 0, 0, entries, 0], np.int32)
        wide[:] = (part.tiles + shift).reshape(-1)
        found += len(part.tiles)


def max_tiles(max_rows: int, tile_rows: int) -> int:
    """Return the most tiles of `tile_rows` rows that a step may have."""
    return min(max_rows, max_rows // (FEW_ROWS + 1) + max_rows // tile_rows + 1)
