"""Owner of all blocks: allocation, reference counts, eviction. Pure Python; the pools follow.

The fate of a block:

    free --allocate--> live (refs > 0) --release--> free, or if the prefix index holds it:
                                                    kept --evict--> free

All pools draw on one budget. A pool claims the bytes of its capacity, used or not, so what is
counted here is what the arrays hold. Pools grow while there is unclaimed budget, then evict what
they keep (least recently used first), then take capacity from other pools that can spare it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.cache.blocks import Block, Change, Holder, PoolKey, Restore, Spill
from quire.cache.capacity import Capacity, Pool

_FIRST_BLOCKS = 16
"""Fewest blocks that a pool grows by."""


class BlockManager:
    """Allocates blocks within a byte budget.

    Args:
        budget: bytes that all pools together may claim.
        block_bytes: returns the bytes of a block of a pool.
        disk_accepts: returns whether the disk tier accepts a block of a name; its bytes argument
            counts those already accepted in the step. None without a disk tier.
        first_bytes: bytes that a pool claims at least when it is first used; not one of tails.
        growth_bytes: returns the bytes that a pool claims at least whenever it grows; 0 if it
            doubles, so that it is copied a few times only.
    """

    def __init__(
        self,
        budget: int,
        block_bytes: Callable[[PoolKey], int],
        disk_accepts: Callable[[bytes, int], bool] | None = None,
        *,
        first_bytes: int = 0,
        growth_bytes: Callable[[PoolKey], int] = lambda key: 0,
    ) -> None:
        self.capacity = Capacity(budget, block_bytes)
        self._disk_accepts = disk_accepts
        self._first_bytes, self._growth_bytes = first_bytes, growth_bytes
        self.releases = 0
        """Number of blocks that lost their last user. While it stands still, there is no more room
        than before.
        """
        self._changes: list[Change] = []
        self._spilled = 0
        self._clock = 0

    # -- what a sequence does ------------------------------------------------------------------

    def allocate(self, key: PoolKey, count: int) -> list[Block] | None:
        """Return `count` blocks with one reference each; None if not all of them fit."""
        pool = self.capacity.pool(key)
        if len(pool.free) < count and not self._make_room(pool, count):
            return None
        return pool.take(count)

    def can_allocate(self, wanted: dict[PoolKey, int]) -> bool:
        """Return whether all of `wanted` would fit if every cached block were evicted."""
        return self.capacity.has_room(wanted)

    def retain(self, block: Block) -> None:
        """Add a user to the block."""
        if block.refs == 0:
            del self._pool_of(block).kept[block]
        block.refs += 1

    def release(self, block: Block) -> None:
        """Remove a user. An unused block stays cached if the index holds it, else it is free."""
        assert block.refs > 0, f"{block} released more often than retained"
        block.refs -= 1
        if block.refs == 0:
            self.releases += 1
            if block.holder is None:
                self._pool_of(block).give_back(block)
            else:
                self._stamp(block)
                self._pool_of(block).kept[block] = None

    def release_all(self, blocks: Iterable[Block | None]) -> None:
        """Release the last blocks first, so that leaves are evicted before their parents."""
        for block in reversed(list(blocks)):
            if block is not None:
                self.release(block)

    # -- what the index does -------------------------------------------------------------------

    def keep(self, block: Block, holder: Holder) -> None:
        """Let the block outlive its users, cached for `holder`."""
        block.holder = holder

    def drop(self, block: Block) -> None:
        """Remove the block from the cache; it is free once it has no users."""
        block.holder = None
        if block.refs == 0:
            del self._pool_of(block).kept[block]
            self._pool_of(block).give_back(block)

    def restore(self, block: Block, name: bytes) -> None:
        """Restore the contents that the disk tier has as `name` to a block before the next step."""
        self._changes.append(Restore(block.pool, block.id, name))

    def spill_kept(self) -> None:
        """Offer cached blocks to the disk tier as if evicted, most recently used first."""
        kept = [block for pool in self.capacity.pools.values() for block in pool.kept]
        kept.sort(key=lambda block: block.stamp)
        first = len(self._changes)
        for block in reversed(kept):
            self._spill(block)
        self._changes[first:] = reversed(self._changes[first:])
        for block in kept:  # what the disk has already is told again, in the order of use
            name = block.holder.name(block) if block.holder is not None else None
            if name is not None and self._disk_accepts is not None:
                self._disk_accepts(name, 0)

    def touch(self, block: Block) -> None:
        """Make the block the most recently used."""
        if block.refs == 0:
            self._stamp(block)
            self._pool_of(block).kept.move_to_end(block)

    # -- what the engine reads -----------------------------------------------------------------

    def reset(self) -> None:
        """Forget every block; the pools do the same. No block may be in use."""
        self.capacity.reset()
        self._changes.clear()
        self._spilled = 0

    def take_changes(self) -> tuple[Change, ...]:
        """Return and clear the pending changes of the pools' arrays, in order."""
        changes, self._changes = tuple(self._changes), []
        self._spilled = 0
        return changes

    # -- how room is made ----------------------------------------------------------------------

    def _pool_of(self, block: Block) -> Pool:
        return self.capacity.pools[block.pool]

    def _stamp(self, block: Block) -> None:
        self._clock += 1
        block.stamp = self._clock

    def _make_room(self, pool: Pool, wanted: int) -> bool:
        """Bring a pool's number of free blocks to `wanted`. Return False, without changes, if
        impossible.
        """
        if not self.capacity.has_room({pool.key: wanted}):
            return False
        growth, first = self._growth_bytes(pool.key), self._first_bytes
        self._grow(pool, max(wanted - len(pool.free), _least_growth(pool, growth, first)))
        while len(pool.free) < wanted and pool.kept:
            self._evict(next(iter(pool.kept)))
        if len(pool.free) < wanted:
            self._take_from_others(pool, (wanted - len(pool.free)) * pool.block_bytes)
            self._grow(pool, wanted - len(pool.free))
        return len(pool.free) >= wanted

    def _grow(self, pool: Pool, wish: int) -> None:
        change = self.capacity.grow(pool, wish)
        if change is not None:
            self._changes.append(change)

    def _evict(self, block: Block) -> None:
        assert block.holder is not None, "what nobody holds is free, not kept"
        for lost in block.holder.lost_with(block) if self._disk_accepts is not None else ():
            self._spill(lost)
        block.holder.forget(block)
        self.drop(block)

    def _spill(self, block: Block) -> None:
        name = block.holder.name(block) if block.holder is not None and block.refs == 0 else None
        if name is None or self._disk_accepts is None:
            return
        size = self._spilled + self._pool_of(block).block_bytes
        if self._disk_accepts(name, size):
            self._spilled = size
            self._changes.append(Spill(block.pool, block.id, name))

    def _take_from_others(self, pool: Pool, need: int) -> None:
        """Make `need` unclaimed bytes: other pools evict least recently used blocks and shrink."""
        pools = self.capacity.pools.values()
        others = [other for other in pools if other is not pool and other.block_bytes]
        spare = self.capacity.unclaimed
        while spare + sum(other.free_bytes for other in others) < need:
            oldest = [next(iter(other.kept)) for other in others if other.kept]
            if not oldest:
                return
            self._evict(min(oldest, key=lambda block: block.stamp))
        for other in sorted(others, key=lambda other: other.free_bytes, reverse=True):
            if spare < need and other.free:
                count = min(len(other.free), -(-(need - spare) // other.block_bytes))
                # Half of what is free at least: a shrink copies the whole pool, so few big ones.
                count = max(count, len(other.free) // 2)
                self._changes.append(self.capacity.shrink(other, count))
                spare += count * other.block_bytes


def _least_growth(pool: Pool, growth_bytes: int, first_bytes: int) -> int:
    """Return the fewest blocks that a pool grows by; for the bytes see `BlockManager`."""
    if pool.key.tail:  # a sequence has one tail, many others
        return max(1, pool.capacity)
    least = growth_bytes or (0 if pool.capacity else first_bytes)
    return max(_FIRST_BLOCKS, least // max(1, pool.block_bytes) if least else pool.capacity)
