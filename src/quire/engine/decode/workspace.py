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
"""Before the positions of a step's inputs: the number of rows, and padding."""
_INVARIANT_ROWS = 8
"""For which keys are split where all numbers of rows must be split alike."""
_GROUP_INTS = 23
"""For each row in each KV group: see `GroupInputs`."""


class Buffer(Enum):
    """What kernels of a step hand to each other, and the step's inputs."""

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
    """A step's inputs for one KV group: addresses, or offsets among the inputs.

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
        offsets = (0, 1, 2, 4, 10, 11, 17)
        return GroupInputs(*(start + each * offset for offset in offsets))


class Workspace:
    """For steps of up to `max_rows` rows.

    Args:
        groups: KV groups.
        entries: of all block tables of a step.
        address: of an array on the device.
    """

    def __init__(
        self,
        stack: Stack,
        groups: int,
        max_rows: int,
        entries: int,
        address: Callable[[mx.array], int],
    ) -> None:
        self._max_rows = max_rows
        self.entries = entries
        sizes = _sizes(stack, max_rows)
        sizes[Buffer.INPUTS] = 4 * (table_start(max_rows, groups) + entries)
        self._starts: dict[Buffer, int] = {}
        total = 0
        for buffer, size in sizes.items():
            self._starts[buffer] = total
            total += -(-size // _ALIGNED) * _ALIGNED
        self._memory = mx.zeros((total,), dtype=mx.uint8)
        mx.eval(self._memory)
        self._base = address(self._memory)
        inputs = self._starts[Buffer.INPUTS]
        self._starts |= {Buffer.ROWS: inputs, Buffer.POSITIONS: inputs + 4 * _HEAD_INTS}
        self.table = self._base + inputs + 4 * table_start(max_rows, groups)

    def at(self, buffer: Buffer) -> int:
        """Its address."""
        return self._base + self._starts[buffer]

    def group(self, number: int) -> GroupInputs:
        """Of a KV group."""
        start = self.at(Buffer.INPUTS) + 4 * group_start(self._max_rows, number)
        return GroupInputs.of(start, 4 * self._max_rows)


def group_start(max_rows: int, number: int) -> int:
    """Where a KV group begins among a step's inputs, which are int32: see `whole.write_group`."""
    return _HEAD_INTS + max_rows + _GROUP_INTS * max_rows * number


def table_start(max_rows: int, groups: int) -> int:
    """Where the block tables begin."""
    return group_start(max_rows, groups)


def _sizes(stack: Stack, max_rows: int) -> dict[Buffer, int]:
    """Bytes."""
    row = 2 * max_rows * stack.hidden_size
    attentions = [layer.attention for layer in stack.layers]
    heads = max(each.heads * each.head_dim for each in attentions)
    kv = 2 * max_rows * max(each.kv_heads * each.head_dim for each in attentions)
    split = max(
        rows * _splits(each, rows, batch_invariant=batch_invariant) * each.heads * each.head_dim
        for each in attentions
        for rows in _up_to(max_rows)
        for batch_invariant in (False, True)
    )
    sizes = {
        Buffer.TOKENS: 4 * max_rows,
        **dict.fromkeys((Buffer.X, Buffer.NORMED, Buffer.NORMED_1, Buffer.NORMED_2, Buffer.Y), row),
        **dict.fromkeys((Buffer.Q, Buffer.ATTENDED), 2 * max_rows * heads),
        **dict.fromkeys((Buffer.K, Buffer.V), kv),
        Buffer.PARTIAL: 4 * split,
        Buffer.STATS: 8 * split // min(each.head_dim for each in attentions),
        Buffer.OWN_PARTIAL: 4 * max_rows * heads,
        Buffer.OWN_STATS: 8 * max_rows * max(each.heads for each in attentions),
    }
    widths = [layer.mlp.gate.codes.shape[0] for layer in stack.layers if layer.mlp is not None]
    sizes[Buffer.INNER] = 2 * max_rows * max(widths, default=0)
    experts = [layer.experts for layer in stack.layers if layer.experts is not None]
    if experts:
        count = max(each.gate.codes.shape[0] for each in experts)
        width = max(each.gate.codes.shape[1] for each in experts)
        pairs = max_rows * max(each.k for each in experts)
        sizes[Buffer.LOGITS] = 2 * max_rows * count
        sizes |= dict.fromkeys((Buffer.CHOSEN, Buffer.WEIGHTS, Buffer.ORDER), 4 * pairs)
        sizes[Buffer.TILES] = 12 * pairs
        sizes |= {Buffer.EXPERT_INNER: 2 * pairs * width}
        sizes |= {Buffer.EXPERT_Y: 2 * pairs * stack.hidden_size}
    else:
        sizes |= dict.fromkeys((Buffer.WEIGHTS, Buffer.EXPERT_Y), 0)
    return sizes


def splits(shape: paged.Shape, rows: int, *, batch_invariant: bool) -> int:
    """Thread blocks that share a row's keys; the same for any `rows` with `batch_invariant`."""
    return shape.splits(_INVARIANT_ROWS if batch_invariant else rows)


def _splits(attention: StackAttention, rows: int, *, batch_invariant: bool) -> int:
    group, dim = attention.heads // attention.kv_heads, attention.head_dim
    shape = paged.Shape(mx.bfloat16, dim, dim, attention.kv_heads, group, 64, False, False)
    return splits(shape, rows, batch_invariant=batch_invariant)


def _up_to(max_rows: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < max_rows:
        sizes.append(2 * sizes[-1])
    return sizes
