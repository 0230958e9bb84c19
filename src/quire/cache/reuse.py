"""The reusable part of a prompt, and the reason why it is not longer."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import compress, count
from operator import ne

from quire.cache.blocks import Block


class MissKind(StrEnum):
    """The reason why reuse ends, as in metrics and response headers."""

    NEW = "new"  # nothing that is kept starts as the prompt does
    DIFFERENCE = "first difference"
    END = "cached prefix ends"  # what was computed before stops there, and nothing differs
    EVICTED = "evicted"
    NO_SNAPSHOT = "snapshot missing"
    BEING_WRITTEN = "still being written"  # by a neighbour that has not shared it yet
    DISABLED = "off"
    EVERY_TOKEN_NEEDED = "every token is computed"  # by the request's task


_ONE_BY_ONE = 64
"""Most items of which the first that differs is found in order."""


@dataclass(frozen=True, slots=True)
class ReuseMiss:
    """The reason why no more is reused.

    Attributes:
        token: position; None if the kind needs none.
    """

    kind: MissKind
    token: int | None = None

    def __str__(self) -> str:
        return str(self.kind) if self.token is None else f"{self.kind} at token {self.token}"


@dataclass(slots=True)
class Match:
    """The cached blocks and snapshots that a prompt can reuse.

    Attributes:
        length: number of tokens whose state is available for every group.
        reached: number of tokens that agree with a computed prompt, whether or not its blocks are
            available.
        blocks: by group, the shared blocks by block number; None where the group needs none.
        partial: by group, the block to copy if `length` is within a block.
        snapshots: by group, the recurrent state at `length`.
        miss: why the match is not longer; None if all was found.
    """

    length: int = 0
    reached: int = 0
    blocks: dict[int, list[Block | None]] = field(default_factory=dict)
    partial: dict[int, Block] = field(default_factory=dict)
    snapshots: dict[int, Block] = field(default_factory=dict)
    miss: ReuseMiss | None = ReuseMiss(MissKind.NEW)


def common_length(a: Seq[int], b: Seq[int]) -> int:
    """Return how many leading items agree. Most sequences part within their first items.

    Args:
        a, b: of one type, because their slices are compared.
    """
    most = min(len(a), len(b))
    low, high = 0, min(_ONE_BY_ONE, most)
    while low < high and a[low:high] == b[low:high]:
        low, high = high, min(2 * high, most)
    while high - low > _ONE_BY_ONE:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    differs = map(ne, a[low:high], b[low:high])
    return next(compress(count(low), differs), high)
