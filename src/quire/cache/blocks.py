"""Blocks, their pools, and the changes that the arrays on the device have to follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from quire.cache.specs import KVGroup
from quire.core.kv_format import KVFormat


@dataclass(frozen=True, slots=True)
class PoolKey:
    """Names a pool: one group of layers in one format.

    Attributes:
        tail: whether it is the pool of tails: sequences' last, partly filled blocks, uncoded.
    """

    group: int
    format: KVFormat
    tail: bool = False
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.group, self.format, self.tail)))

    def __hash__(self) -> int:  # asked for whenever a block changes hands
        return self._hash

    def __reduce__(self) -> tuple[type[PoolKey], tuple[int, KVFormat, bool]]:
        return PoolKey, (self.group, self.format, self.tail)  # hashes differ between processes


def blocks_by_pool(
    groups: Iterable[KVGroup], format: KVFormat, count: Callable[[KVGroup], int]
) -> dict[PoolKey, int]:
    """Return how many blocks of each pool a sequence takes with `count` blocks of each group.

    In formats with tails it also takes one tail block of each attention group.
    """
    wanted: dict[PoolKey, int] = {}
    for group in groups:
        wanted[PoolKey(group.index, format)] = count(group)
        if format.has_tail and group.spec.attention is not None:
            wanted[PoolKey(group.index, format, tail=True)] = 1
    return wanted


class Holder(Protocol):
    """A cache that keeps blocks beyond the life of the sequences that made them."""

    def name(self, block: Block) -> bytes | None:
        """Return a name of the block's contents that outlives the process; None if incomplete."""
        ...

    def tokens_in(self, block: Block) -> int:
        """Return how many tokens of the block are in use by the holder."""
        ...

    def lost_with(self, block: Block) -> Iterable[Block]:
        """Return the blocks that become useless without this one, itself included."""
        ...

    def forget(self, block: Block) -> None:
        """Drop every reference to the block, which is being evicted."""
        ...


class Block:
    """One block of one pool. `id` changes only when the pool shrinks."""

    __slots__ = ("holder", "id", "pool", "refs", "stamp")

    def __init__(self, pool: PoolKey, id: int) -> None:
        self.pool = pool
        self.id = id
        self.refs = 1
        self.holder: Holder | None = None
        self.stamp = 0

    def __repr__(self) -> str:
        return f"Block({self.pool.group}, {self.pool.format.name}, id={self.id}, refs={self.refs})"


@dataclass(frozen=True, slots=True)
class Resize:
    """A resize of a pool's arrays to `capacity` blocks, after `moves` (from id, to id).

    Attributes:
        spare: bytes that may be held twice while arrays are copied; None if any number may.
        most: the most blocks that the budget allows the pool; 0 if nobody knows.
        grows: whether the pool had at most `capacity` blocks.
    """

    pool: PoolKey
    capacity: int
    moves: tuple[tuple[int, int], ...] = ()
    spare: int | None = None
    most: int = 0
    grows: bool = False


@dataclass(frozen=True, slots=True)
class Spill:
    """A transfer of a block to the disk tier, as `name`, before its place `id` is reused."""

    pool: PoolKey
    id: int
    name: bytes


@dataclass(frozen=True, slots=True)
class Restore:
    """A transfer of the contents of `name` from the disk tier to the block at `id`."""

    pool: PoolKey
    id: int
    name: bytes


Change = Resize | Spill | Restore
