"""Where a step's inputs lie on the device. The addresses stay, so that graphs may be kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

_HEAD_INTS = 4
"""Before the positions of a step's inputs: the number of rows, and padding."""
_GROUP_INTS = 23
"""For each row in each KV group: see `GroupInputs`."""


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """A step's inputs for one KV group: addresses, or offsets among the inputs.

    Attributes:
        blocks, offsets: the slot that each row is written to.
        visible: the first and the last key that a row sees.
        tiles: of plain blocks.
        tails: the block that keeps a row's own block as written, in formats with tails.
        coded, own: tiles of these formats, see `packed.tiles_of`.
    """

    blocks: int
    offsets: int
    visible: int
    tiles: int
    tails: int
    coded: int
    own: int

    @staticmethod
    def of(start: int, each: int) -> GroupInputs:
        """Lay out the inputs from `start` on; one number for all rows takes `each`."""
        offsets = (0, 1, 2, 4, 10, 11, 17)
        return GroupInputs(*(start + each * offset for offset in offsets))


class InputLayout:
    """Memory for the inputs of steps of up to `max_rows` rows.

    Args:
        groups: KV groups.
        entries: the most entries of all block tables of a step.
        address: of an array on the device.
    """

    def __init__(
        self, groups: int, max_rows: int, entries: int, address: Callable[[mx.array], int]
    ) -> None:
        self._max_rows = max_rows
        self.entries = entries
        start = table_start(max_rows, groups)
        self._memory = mx.zeros((max_rows + start + entries,), dtype=mx.int32)
        mx.eval(self._memory)
        self.tokens = address(self._memory)
        self.numbers = self.tokens + 4 * max_rows
        """Everything but the tokens: `rows` comes first."""
        self.rows = self.numbers
        self.positions = self.numbers + 4 * _HEAD_INTS
        self.table = self.numbers + 4 * start

    def group(self, number: int) -> GroupInputs:
        """Return the addresses of a KV group's inputs."""
        start = self.numbers + 4 * group_start(self._max_rows, number)
        return GroupInputs.of(start, 4 * self._max_rows)


def group_start(max_rows: int, number: int) -> int:
    """Return where a KV group begins among a step's int32 inputs."""
    return _HEAD_INTS + max_rows + _GROUP_INTS * max_rows * number


def table_start(max_rows: int, groups: int) -> int:
    """Return where the block tables begin among a step's int32 inputs."""
    return group_start(max_rows, groups)
