"""Memory that a decode step's kernels write to. Its addresses stay, so that graphs may be kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import mlx.core as mx

from quire.attention.paged import cuda as paged
from quire.models.stack import Stack, StackAttention

_ALIGNED = 256
_HEAD_INTS = 4
"""Before the positions of a step's inputs: the number of rows, and room."""
_EVEN_ROWS = 8
"""For which keys are split where all numbers of rows must be split alike."""
_GROUP_INTS = 23
"""For each row in each KV group: see `GroupInputs`."""


class Place(Enum):
    """What is where."""

    TOKENS = auto()
    INPUTS = auto()
    ROWS = auto()
    POSITIONS = auto()
    X = auto()
    NORMED = auto()
    NORMED_1 = auto()
    NORMED_2 = auto()
    Q = auto()
    K = auto()
    V = auto()
    PARTIAL = auto()
    STATS = auto()
    OWN_PARTIAL = auto()
    OWN_STATS = auto()
    ATTENDED = auto()
    Y = auto()
    INNER = auto()
    LOGITS = auto()
    CHOSEN = auto()
    WEIGHTS = auto()
    ORDER = auto()
    TILES = auto()
    EXPERT_INNER = auto()
    EXPERT_Y = auto()


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """A step's inputs for one KV group: addresses, or places among the inputs.

    Attributes:
        blocks, offsets: where each row is written.
        visible: the first and the last key that it sees.
        tiles: of plain blocks.
        tails: the block that keeps its own block as written, in formats with tails.
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
        """From `start` on; one number for all rows takes `each`."""
        places = (0, 1, 2, 4, 10, 11, 17)
        return GroupInputs(*(start + each * place for place in places))


class Room:
    """For steps of up to `most` rows.

    Args:
        groups: KV groups.
        entries: of all block tables of a step.
        address: of an array on the device.
    """

    def __init__(
        self,
        stack: Stack,
        groups: int,
        most: int,
        entries: int,
        address: Callable[[mx.array], int],
    ) -> None:
        self._most = most
        self.entries = entries
        sizes = _sizes(stack, most)
        sizes[Place.INPUTS] = 4 * (table_start(most, groups) + entries)
        self._starts: dict[Place, int] = {}
        total = 0
        for place, size in sizes.items():
            self._starts[place] = total
            total += -(-size // _ALIGNED) * _ALIGNED
        self._memory = mx.zeros((total,), dtype=mx.uint8)
        mx.eval(self._memory)
        self._base = address(self._memory)
        inputs = self._starts[Place.INPUTS]
        self._starts |= {Place.ROWS: inputs, Place.POSITIONS: inputs + 4 * _HEAD_INTS}
        self.table = self._base + inputs + 4 * table_start(most, groups)

    def at(self, place: Place) -> int:
        """Its address."""
        return self._base + self._starts[place]

    def group(self, number: int) -> GroupInputs:
        """Of a KV group."""
        start = self.at(Place.INPUTS) + 4 * group_start(self._most, number)
        return GroupInputs.of(start, 4 * self._most)


def group_start(most: int, number: int) -> int:
    """Where a KV group begins among a step's inputs, which are int32: see `whole.write_group`."""
    return _HEAD_INTS + most + _GROUP_INTS * most * number


def table_start(most: int, groups: int) -> int:
    """Where the block tables begin."""
    return group_start(most, groups)


def _sizes(stack: Stack, most: int) -> dict[Place, int]:
    """Bytes."""
    row = 2 * most * stack.hidden_size
    attentions = [layer.attention for layer in stack.layers]
    heads = max(each.heads * each.head_dim for each in attentions)
    kv = 2 * most * max(each.kv_heads * each.head_dim for each in attentions)
    split = max(
        rows * _splits(each, rows, even=even) * each.heads * each.head_dim
        for each in attentions
        for rows in _up_to(most)
        for even in (False, True)
    )
    sizes = {
        Place.TOKENS: 4 * most,
        **dict.fromkeys((Place.X, Place.NORMED, Place.NORMED_1, Place.NORMED_2, Place.Y), row),
        **dict.fromkeys((Place.Q, Place.ATTENDED), 2 * most * heads),
        **dict.fromkeys((Place.K, Place.V), kv),
        Place.PARTIAL: 4 * split,
        Place.STATS: 8 * split // min(each.head_dim for each in attentions),
        Place.OWN_PARTIAL: 4 * most * heads,
        Place.OWN_STATS: 8 * most * max(each.heads for each in attentions),
    }
    widths = [layer.mlp.gate.codes.shape[0] for layer in stack.layers if layer.mlp is not None]
    sizes[Place.INNER] = 2 * most * max(widths, default=0)
    experts = [layer.experts for layer in stack.layers if layer.experts is not None]
    if experts:
        count = max(each.gate.codes.shape[0] for each in experts)
        width = max(each.gate.codes.shape[1] for each in experts)
        pairs = most * max(each.k for each in experts)
        sizes[Place.LOGITS] = 2 * most * count
        sizes |= dict.fromkeys((Place.CHOSEN, Place.WEIGHTS, Place.ORDER), 4 * pairs)
        sizes[Place.TILES] = 12 * pairs
        sizes |= {Place.EXPERT_INNER: 2 * pairs * width}
        sizes |= {Place.EXPERT_Y: 2 * pairs * stack.hidden_size}
    else:
        sizes |= dict.fromkeys((Place.WEIGHTS, Place.EXPERT_Y), 0)
    return sizes


def splits(shape: paged.Shape, rows: int, *, even: bool) -> int:
    """Thread blocks that share the keys of each row; with `even` the same for any rows."""
    return shape.splits(_EVEN_ROWS if even else rows)


def _splits(attention: StackAttention, rows: int, *, even: bool) -> int:
    group, dim = attention.heads // attention.kv_heads, attention.head_dim
    shape = paged.Shape(mx.bfloat16, dim, dim, attention.kv_heads, group, 64, False, False)
    return splits(shape, rows, even=even)


def _up_to(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes
