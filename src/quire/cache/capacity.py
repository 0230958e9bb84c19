"""Number of blocks of each pool, within one byte budget. Pure Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from quire.cache.blocks import Block, PoolKey, Resize

_COPIED_SHARE = 16
"""Arrays may exceed the budget by this fraction of it, 1 / 16, while a pool is resized."""


@dataclass(slots=True)
class Pool:
    """The blocks of one pool: `blocks[id]` is the block with that id, None if free.

    Attributes:
        block_bytes: 0 where no layer of the group stores anything in the pool, such as a pool of
            tails whose layers are all plain.
        kept: blocks that nobody uses and the prefix index holds, least recently used first.
    """

    key: PoolKey
    block_bytes: int
    blocks: list[Block | None] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    kept: OrderedDict[Block, None] = field(default_factory=OrderedDict)

    @property
    def capacity(self) -> int:
        """Number of blocks in the arrays, used or not."""
        return len(self.blocks)

    @property
    def live(self) -> int:
        """Number of blocks in use."""
        return self.capacity - len(self.free) - len(self.kept)

    @property
    def free_bytes(self) -> int:
        """Bytes of free blocks."""
        return len(self.free) * self.block_bytes

    def take(self, count: int) -> list[Block]:
        """Take `count` free blocks, with one reference each."""
        blocks = [Block(self.key, self.free.pop()) for _ in range(count)]
        for block in blocks:
            self.blocks[block.id] = block
        return blocks

    def give_back(self, block: Block) -> None:
        """Free a block."""
        self.blocks[block.id] = None
        self.free.append(block.id)


class Capacity:
    """The pools and their claims: a pool claims bytes for its capacity, used or not.

    Args:
        budget: bytes that all pools together may claim.
        block_bytes: returns the bytes of a block of a pool.
    """

    def __init__(self, budget: int, block_bytes: Callable[[PoolKey], int]) -> None:
        self.budget = budget
        self.block_bytes = cache(block_bytes)
        self.claimed = 0
        self.epoch = 0
        """Number of changes of block ids; caches of ids compare it."""
        self.pools: dict[PoolKey, Pool] = {}

    @property
    def unclaimed(self) -> int:
        """Bytes of the budget that no pool has claimed."""
        return self.budget - self.claimed

    def pool(self, key: PoolKey) -> Pool:
        """Return a pool; an empty one at the first call."""
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = Pool(key, self.block_bytes(key))
        return pool

    def bytes_of(self, wanted: Mapping[PoolKey, int]) -> int:
        """Return the bytes of so many blocks of each pool."""
        return sum(count * self.block_bytes(key) for key, count in wanted.items())

    def has_room(self, wanted: Mapping[PoolKey, int]) -> bool:
        """Return whether all of `wanted` would fit if every cached block were evicted."""
        missing = {k: max(0, count - len(self.pool(k).free)) for k, count in wanted.items()}
        spare = self.unclaimed
        for key, pool in self.pools.items():
            surplus = max(0, len(pool.free) - wanted.get(key, 0))
            spare += (surplus + len(pool.kept)) * pool.block_bytes
        return self.bytes_of(missing) <= spare

    def grow(self, pool: Pool, wish: int) -> Resize | None:
        """Claim up to `wish` more blocks for a pool; return None if none fits."""
        extra = min(wish, self.unclaimed // pool.block_bytes) if pool.block_bytes else wish
        if extra <= 0:
            return None
        pool.free.extend(range(pool.capacity + extra - 1, pool.capacity - 1, -1))
        pool.blocks.extend([None] * extra)
        self.claimed += extra * pool.block_bytes
        return Resize(
            pool.key, pool.capacity, spare=self._spare(), most=self._most(pool), grows=True
        )

    def shrink(self, pool: Pool, count: int) -> Resize:
        """Remove `count` free blocks from a pool's end, moving others down."""
        capacity, spare = pool.capacity - count, self._spare()
        pool.free.sort(reverse=True)
        low = [id for id in pool.free if id < capacity]
        moves = []
        for block in pool.blocks[capacity:]:
            if block is not None:
                target = low.pop()
                moves.append((block.id, target))
                block.id = target
                pool.blocks[target] = block
        del pool.blocks[capacity:]
        pool.free = low
        self.claimed -= count * pool.block_bytes
        self.epoch += 1
        return Resize(pool.key, capacity, tuple(moves), spare=spare, most=self._most(pool))

    def _most(self, pool: Pool) -> int:
        """Return the most blocks that the budget allows a pool."""
        return self.budget // max(1, pool.block_bytes)

    def _spare(self) -> int:
        """Return the bytes available for copies while a pool is resized."""
        return self.unclaimed + self.budget // _COPIED_SHARE

    def reset(self) -> None:
        """Remove all blocks from all pools."""
        self.pools.clear()
        self.claimed = 0
        self.epoch += 1

    def usage(self) -> dict[PoolKey, tuple[int, int, int]]:
        """Return, by pool, the bytes that sequences hold, cached bytes, and claimed bytes."""
        table = {}
        for key, pool in self.pools.items():
            size = pool.block_bytes
            table[key] = (pool.live * size, len(pool.kept) * size, pool.capacity * size)
        return table
