"""Who holds which block. Pure Python: the pools on the device follow what is decided here.

The fate of a block:

    free --allocate--> live (refs > 0) --release--> free, or if the prefix index holds it:
                                                    kept --evict--> free

All pools draw on one budget. A pool claims the bytes of its capacity, used or not, so what is
counted here is what the arrays hold. Pools grow while there is unclaimed budget, then evict what
they keep (least recently used first), then take capacity from other pools that can spare it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from quire.cache.disk_page import HostPage
from quire.core.kv_format import KVFormat

_FIRST_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class PoolKey:
    """Names a pool: one group of layers in one format.

    Attributes:
        tail: the pool of the sequences' last, still filling blocks, as written.
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


class Holder(Protocol):
    """Keeps blocks beyond the life of the sequences that made them."""

    def name(self, block: Block) -> bytes | None:
        """A name that says what is in the block and outlives the process; None: not complete."""
        ...

    def tokens_in(self, block: Block) -> int:
        """How many tokens of the block are relied on."""
        ...

    def lost_with(self, block: Block) -> Iterable[Block]:
        """The blocks that go when this one is forgotten, itself included."""
        ...

    def forget(self, block: Block) -> None:
        """The block is being evicted; drop every reference to it."""
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
    """A pool's arrays get `capacity` blocks, after `moves` (from id, to id) within them."""

    pool: PoolKey
    capacity: int
    moves: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Spill:
    """A block is about to lose its place `id`; its contents go to the disk tier as `name`."""

    pool: PoolKey
    id: int
    name: bytes


@dataclass(frozen=True, slots=True)
class Restore:
    """A block at `id` gets `contents` that the disk tier read."""

    pool: PoolKey
    id: int
    contents: HostPage


Change = Resize | Spill | Restore


@dataclass(slots=True)
class _Pool:
    """One pool's blocks: `blocks[id]` is the block that has the id, None where it is free."""

    key: PoolKey
    block_bytes: int
    blocks: list[Block | None] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    kept: OrderedDict[Block, None] = field(default_factory=OrderedDict)

    @property
    def capacity(self) -> int:
        return len(self.blocks)


class BlockManager:
    """Hands out blocks within a budget.

    Args:
        budget: bytes that all pools together may claim.
        block_bytes: bytes of a block of a pool.
    """

    def __init__(self, budget: int, block_bytes: Callable[[PoolKey], int]) -> None:
        self.budget = budget
        self.claimed = 0
        self.epoch = 0
        """Counts the times that block ids changed; caches of ids compare it."""
        self.disk_accepts: Callable[[bytes, int], bool] | None = None
        """Whether the disk tier accepts a block of that name; the bytes count those accepted before
        in the same step. None: there is no disk tier."""
        self.block_bytes = block_bytes
        self.releases = 0
        """Counts the blocks that lost their last user; only then is there more room than before."""
        self._pools: dict[PoolKey, _Pool] = {}
        self._changes: list[Change] = []
        self._spilled = 0
        self._clock = 0

    # -- what a sequence does ------------------------------------------------------------------

    def allocate(self, key: PoolKey, count: int) -> list[Block] | None:
        """`count` blocks with one reference each, or None when there is no room for all of them."""
        pool = self._pool(key)
        if len(pool.free) < count and not self._make_room(pool, count):
            return None
        blocks = []
        for _ in range(count):
            block = Block(pool.key, pool.free.pop())
            pool.blocks[block.id] = block
            blocks.append(block)
        return blocks

    def can_allocate(self, wanted: dict[PoolKey, int]) -> bool:
        """Whether all of `wanted` would fit if everything kept were evicted."""
        spare = self.budget - self.claimed
        need = 0
        for key, count in wanted.items():
            pool = self._pool(key)
            need += max(0, count - len(pool.free)) * pool.block_bytes
        for key, pool in self._pools.items():
            surplus = max(0, len(pool.free) - wanted.get(key, 0))
            spare += (surplus + len(pool.kept)) * pool.block_bytes
        return need <= spare

    def retain(self, block: Block) -> None:
        """One more user of the block."""
        if block.refs == 0:
            del self._pools[block.pool].kept[block]
        block.refs += 1

    def release(self, block: Block) -> None:
        """One user less. The last one leaves it kept if the index holds it, else free."""
        assert block.refs > 0, f"{block} released more often than retained"
        block.refs -= 1
        if block.refs == 0:
            self.releases += 1
            if block.holder is None:
                self._free(block)
            else:
                self._stamp(block)
                self._pools[block.pool].kept[block] = None

    def release_all(self, blocks: Iterable[Block | None]) -> None:
        """Releases the last blocks first, so that leaves are evicted before what they hang on."""
        for block in reversed(list(blocks)):
            if block is not None:
                self.release(block)

    # -- what the index does -------------------------------------------------------------------

    def keep(self, block: Block, holder: Holder) -> None:
        """From now on the block outlives its users."""
        block.holder = holder

    def drop(self, block: Block) -> None:
        """The index lets go of the block; it is free as soon as nobody uses it."""
        block.holder = None
        if block.refs == 0:
            del self._pools[block.pool].kept[block]
            self._free(block)

    def restore(self, block: Block, contents: HostPage) -> None:
        """The block gets what the disk tier kept of it, before the next step."""
        self._changes.append(Restore(block.pool, block.id, contents))

    def spill_kept(self) -> None:
        """Offers what is kept to the disk tier as if evicted: what was used last, if not all."""
        kept = [block for pool in self._pools.values() for block in pool.kept]
        kept.sort(key=lambda block: block.stamp)
        first = len(self._changes)
        for block in reversed(kept):
            self._spill(block)
        self._changes[first:] = reversed(self._changes[first:])
        for block in kept:  # what the disk has already is told again, in the order of use
            name = block.holder.name(block) if block.holder is not None else None
            if name is not None and self.disk_accepts is not None:
                self.disk_accepts(name, 0)

    def touch(self, block: Block) -> None:
        """The block was wanted; it is now the most recently used."""
        if block.refs == 0:
            self._stamp(block)
            self._pools[block.pool].kept.move_to_end(block)

    # -- what the engine reads -----------------------------------------------------------------

    def reset(self) -> None:
        """Forgets every block; the pools do the same. Nobody may hold one any more."""
        self._pools.clear()
        self._changes.clear()
        self._spilled = 0
        self.claimed = 0
        self.epoch += 1

    def take_changes(self) -> tuple[Change, ...]:
        """What the arrays must do before the next step, in order. Taken once."""
        changes, self._changes = tuple(self._changes), []
        self._spilled = 0
        return changes

    def usage(self) -> dict[PoolKey, tuple[int, int, int]]:
        """For each pool: bytes that sequences hold, bytes kept for reuse, bytes claimed."""
        table = {}
        for key, pool in self._pools.items():
            kept = len(pool.kept)
            live = pool.capacity - len(pool.free) - kept
            size = pool.block_bytes
            table[key] = (live * size, kept * size, pool.capacity * size)
        return table

    def kept_blocks(self) -> int:
        """How many blocks are kept for reuse and used by nobody."""
        return sum(len(pool.kept) for pool in self._pools.values())

    def live_blocks(self) -> int:
        """How many blocks somebody uses."""
        return sum(b.capacity - len(b.free) - len(b.kept) for b in self._pools.values())

    # -- how room is made ----------------------------------------------------------------------

    def _pool(self, key: PoolKey) -> _Pool:
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(key, max(1, self.block_bytes(key)))
        return pool

    def _stamp(self, block: Block) -> None:
        self._clock += 1
        block.stamp = self._clock

    def _free(self, block: Block) -> None:
        pool = self._pools[block.pool]
        pool.blocks[block.id] = None
        pool.free.append(block.id)

    def _make_room(self, pool: _Pool, wanted: int) -> bool:
        """Brings a pool's free blocks to `wanted`, or changes nothing and says no."""
        if not self.can_allocate({pool.key: wanted}):
            return False
        first = 1 if pool.key.tail else _FIRST_BLOCKS  # a sequence has one tail, many others
        self._grow(pool, max(wanted - len(pool.free), pool.capacity, first))
        while len(pool.free) < wanted and pool.kept:
            self._evict(next(iter(pool.kept)))
        if len(pool.free) < wanted:
            self._take_from_others(pool, (wanted - len(pool.free)) * pool.block_bytes)
            self._grow(pool, wanted - len(pool.free))
        return len(pool.free) >= wanted

    def _grow(self, pool: _Pool, wish: int) -> None:
        room = (self.budget - self.claimed) // pool.block_bytes
        extra = min(wish, room)
        if extra > 0:
            pool.free.extend(range(pool.capacity + extra - 1, pool.capacity - 1, -1))
            pool.blocks.extend([None] * extra)
            self.claimed += extra * pool.block_bytes
            self._changes.append(Resize(pool.key, pool.capacity))

    def _evict(self, block: Block) -> None:
        assert block.holder is not None, "what nobody holds is free, not kept"
        for lost in block.holder.lost_with(block) if self.disk_accepts is not None else ():
            self._spill(lost)
        block.holder.forget(block)
        self.drop(block)

    def _spill(self, block: Block) -> None:
        name = block.holder.name(block) if block.holder is not None and block.refs == 0 else None
        if name is None or self.disk_accepts is None:
            return
        size = self._spilled + self._pools[block.pool].block_bytes
        if self.disk_accepts(name, size):
            self._spilled = size
            self._changes.append(Spill(block.pool, block.id, name))

    def _take_from_others(self, pool: _Pool, need: int) -> None:
        """Makes `need` unclaimed bytes: others evict what was used least recently, and shrink."""
        others = [other for other in self._pools.values() if other is not pool]
        spare = self.budget - self.claimed
        while spare + sum(len(b.free) * b.block_bytes for b in others) < need:
            oldest = [next(iter(other.kept)) for other in others if other.kept]
            if not oldest:
                return
            self._evict(min(oldest, key=lambda block: block.stamp))
        for other in sorted(others, key=lambda b: len(b.free) * b.block_bytes, reverse=True):
            if spare < need and other.free:
                count = min(len(other.free), -(-(need - spare) // other.block_bytes))
                # Half of what is free at least: a shrink copies the whole pool, so few big ones.
                spare += self._shrink(other, max(count, len(other.free) // 2))

    def _shrink(self, pool: _Pool, count: int) -> int:
        """Takes `count` free blocks off a pool's end, moving others down. Returns their bytes."""
        capacity = pool.capacity - count
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
        self._changes.append(Resize(pool.key, capacity, tuple(moves)))
        return count * pool.block_bytes
