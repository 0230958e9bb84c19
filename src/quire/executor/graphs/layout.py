"""Device buffers of a step's inputs. Their addresses are fixed, so recorded graphs stay valid.

`input_numbers.py` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from quire.attention.paged.tiles import TILE_FIELDS
from quire.attention.paged.tiling import Tiling
from quire.executor.graphs import device_memory
from quire.executor.graphs.attention.prompt_rows import (
    WRITTEN_FIELDS,
    most_tiles,
)
from quire.executor.graphs.records import StepRecord, addresses, by_row, once, record_type
from quire.executor.graphs.states import StateInputs
from quire.scheduler.plan import ScheduledSequence

_HEAD_INTS = 4
"""Integers before the positions: the numbers of rows and of wanted rows, the place of `RowsBehind`
among the integers of a step's inputs, and padding.
"""


@dataclass(frozen=True)
class GroupInputs:
    """Addresses of a step's inputs for one KV group.

    Attributes:
        blocks, offsets: the slot that each row is written to.
        visible: the first and the last key that a row sees.
        tiles: tiles of plain blocks, one row each: that of row n is the n-th. Beside `wide`, those
            of the other rows, one behind the other.
        tails: for each row, its sequence's tail block, in formats with tails; -1 - n for a row that
            is written to block n of the workspace.
        coded, own: tiles of rows that read codes. In formats with tails see `packed.tiles_of`;
            without, there is `coded` alone, in steps where other rows may read a workspace.
        wide: tiles of several rows of one sequence, over plain blocks.
        prompts: tiles of several rows of one sequence, over the workspace.
        written: see `PromptRows`.
        decoded: the workspace's blocks, where their ids begin in the table, and the blocks that the
            step writes there.
    """

    blocks: int = by_row()
    offsets: int = by_row()
    visible: int = by_row(2)
    tiles: int = by_row(TILE_FIELDS)
    tails: int = by_row()
    coded: int = by_row(TILE_FIELDS)
    own: int = by_row(TILE_FIELDS)
    wide: int = by_row(TILE_FIELDS)
    prompts: int = by_row(TILE_FIELDS)
    written: int = by_row(WRITTEN_FIELDS)
    decoded: int = once(4)


@cache
def step_type(max_rows: int, groups: int, axes: int = 0) -> np.dtype[np.void]:
    """Return the structured type of a step's inputs, but for its tokens and block tables.

    A group is one of `GroupInputs`; a group of states uses its start, see `states_of`.

    Args:
        axes: axes of positions, as in `Variant`.
    """
    group = record_type(GroupInputs, max_rows)
    positions = (np.float32, (max_rows, axes)) if axes else (np.int32, (max_rows,))
    return np.dtype(
        [
            ("rows", np.int32, (_HEAD_INTS,)),
            ("positions", *positions),
            ("wanted", np.int32, (max_rows,)),
            ("placed", np.bool_, (max_rows,)),
            ("groups", group, (groups,)),
        ]
    )


def group_of(step: StepRecord, number: int) -> StepRecord:
    """Return the inputs of a KV group, by the fields of `GroupInputs`. A view."""
    return step["groups"][0, number : number + 1]


def states_of(step: StepRecord, number: int) -> StepRecord:
    """Return the inputs of a group of states, by the fields of `StateInputs`. A view."""
    max_rows = step["placed"].shape[-1]
    own = record_type(StateInputs, max_rows)
    return group_of(step, number).view(np.uint8)[: own.itemsize].view(own)


class InputLayout:
    """Device memory for the inputs of steps of up to `max_rows` rows.

    Args:
        groups: KV groups.
        entries: the most block table entries of a step, all tables together.
        address: returns the device address of an array.
        tilings: for each group, how rows of sequences with many rows are divided; empty if each row
            is a tile.
        workspace: for each group, the blocks of a workspace; with `tilings`.
        axes: axes of positions, as in `Variant`.
    """

    def __init__(
        self,
        groups: int,
        max_rows: int,
        entries: int,
        address: Callable[[mx.array], int],
        tilings: Sequence[Tiling] = (),
        workspace: Sequence[int] = (),
        axes: int = 0,
    ) -> None:
        self.max_rows = max_rows
        self.axes = axes
        self.tilings, self.workspace = tilings, workspace
        self.entries = entries
        inputs = step_type(max_rows, groups, axes)
        assert inputs.fields is not None, "a step has inputs"
        size = max_rows + inputs.itemsize // 4 + entries
        self._memory = device_memory.unwritten((size,), mx.int32)
        self.tokens = address(self._memory)
        self.numbers = self.tokens + 4 * max_rows
        """Address of all inputs except tokens. The first is `rows`."""
        self.rows = self.numbers
        self.wanted_rows = self.numbers + 4
        """The number of wanted rows, and at `wanted` which they are."""
        self.behind = self.numbers + 8
        self.wanted = self.numbers + inputs.fields["wanted"][1]
        self.positions = self.numbers + inputs.fields["positions"][1]
        self.placed = self.numbers + inputs.fields["placed"][1]
        """Whether each row is media; see `MediaRows`."""
        self._first_group = self.numbers + inputs.fields["groups"][1]
        self.table = self.numbers + inputs.itemsize

        self._groups = [
            addresses(GroupInputs, self._group(number), max_rows) for number in range(groups)
        ]

    def index(self, at: int) -> int:
        """Return the place of an address among the integers of a step's inputs."""
        return (at - self.tokens) // 4

    def group(self, number: int) -> GroupInputs:
        """Return the addresses of a KV group's inputs."""
        return self._groups[number]

    def array(self, at: int) -> mx.array:
        """Return the memory of all rows' inputs that begin at one of the addresses, as int32:
        `[max_rows]`, and `[max_rows * axes]` of positions that have axes.
        """
        start = self.index(at)
        each = max(1, self.axes) if at == self.positions else 1
        return self._memory[start : start + self.max_rows * each]

    def positions_of(self, rows: int) -> mx.array:
        """Return the positions of rows that graphs read, as programs have them: int32 `[T]`, or
        float32 `[T, axes]`.
        """
        found = self.array(self.positions)
        return found.view(mx.float32).reshape(-1, self.axes)[:rows] if self.axes else found[:rows]

    def has_tiles(self, rows: Sequence[ScheduledSequence], max_rows: int, block_size: int) -> bool:
        """Return whether a graph of `max_rows` rows has as many tiles as a step's readers of
        workspaces may need.
        """
        if not self.workspace or rows[0].format.scheme == "plain":
            return True
        attended = zip(self.tilings, self.workspace, strict=True)
        return all(
            most_tiles(rows, block_size, each.rows) <= each.most_tiles(max_rows)
            for each in {tiling for tiling, blocks in attended if blocks}
        )

    def states(self, number: int) -> StateInputs:
        """Return the addresses of the inputs of a group of recurrent states."""
        return addresses(StateInputs, self._group(number), self.max_rows)

    def _group(self, number: int) -> int:
        return self._first_group + number * record_type(GroupInputs, self.max_rows).itemsize
