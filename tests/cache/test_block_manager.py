"""Allocation of blocks: which sequence gets which block, what is evicted, and that the budget
holds.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import Block, Change, PoolKey, Resize, Spill
from quire.core.kv_format import KVFormat
from tests.support.blocks import kept_blocks, live_blocks

KEY = PoolKey(0, KVFormat())
OTHER = PoolKey(1, KVFormat())
PACKED = PoolKey(0, KVFormat("page", 4, 4))
BYTES = {KEY: 10, OTHER: 25, PACKED: 3}


class Keeper:
    """Holds blocks, each by itself, and remembers in which order they were evicted."""

    def __init__(self) -> None:
        self.evicted: list[Block] = []

    def name(self, block: Block) -> bytes | None:
        return b"page %d" % block.id

    def lost_with(self, block: Block) -> Iterable[Block]:
        return [block]

    def forget(self, block: Block) -> None:
        self.evicted.append(block)


def make(blocks: int) -> BlockManager:
    """Return a block manager with room for so many blocks of `KEY`."""
    return BlockManager(blocks * BYTES[KEY], BYTES.__getitem__)


def take(manager: BlockManager, count: int, key: PoolKey = KEY) -> list[Block]:
    blocks = manager.allocate(key, count)
    assert blocks is not None
    return blocks


def keep(manager: BlockManager, blocks: list[Block]) -> Keeper:
    """Gives blocks to a holder, then lets go of them, first to last."""
    keeper = Keeper()
    for block in blocks:
        manager.keep(block, keeper)
        manager.release(block)
    return keeper


def capacities(changes: Iterable[Change]) -> dict[PoolKey, int]:
    """Return what the arrays end up with."""
    return {change.pool: change.capacity for change in changes if isinstance(change, Resize)}


def test_a_pool_claims_its_first_bytes_at_once_and_then_doubles() -> None:
    manager = BlockManager(1000 * BYTES[KEY], BYTES.__getitem__, first_bytes=100 * BYTES[KEY])
    take(manager, 1)
    take(manager, 99)
    assert capacities(manager.take_changes()) == {KEY: 100}
    take(manager, 1)
    take(manager, 1, OTHER)
    assert capacities(manager.take_changes()) == {KEY: 200, OTHER: 40}
    take(manager, 100)
    assert capacities(manager.take_changes()) == {KEY: 400}


def test_pages_of_a_pool_have_ids_of_their_own_within_its_capacity() -> None:
    manager = make(40)
    ids = [block.id for block in take(manager, 3) + take(manager, 30)]
    assert sorted(ids) == list(range(33))
    assert capacities(manager.take_changes())[KEY] >= 33
    assert manager.take_changes() == ()


def test_no_room_changes_nothing() -> None:
    manager = make(4)
    take(manager, 3)
    before = manager.capacity.usage(), manager.take_changes()
    assert manager.allocate(KEY, 2) is None
    assert not manager.can_allocate({KEY: 2})
    assert (manager.capacity.usage(), manager.take_changes()) == (before[0], ())


def test_a_page_is_free_when_its_last_user_lets_go() -> None:
    manager = make(2)
    blocks = take(manager, 2)
    manager.retain(blocks[0])
    manager.release_all(blocks)
    assert live_blocks(manager) == 1
    assert manager.allocate(KEY, 2) is None
    manager.release(blocks[0])
    assert len(take(manager, 2)) == 2


def test_what_is_kept_goes_least_recently_used_first() -> None:
    manager = make(3)
    first, second, third = blocks = take(manager, 3)
    keeper = keep(manager, blocks)
    assert kept_blocks(manager) == 3
    manager.touch(first)
    take(manager, 2)
    assert keeper.evicted == [second, third]
    manager.retain(first)
    assert manager.allocate(KEY, 1) is None


def test_a_page_in_use_outlives_its_holder() -> None:
    manager = make(1)
    (block,) = take(manager, 1)
    manager.keep(block, Keeper())
    manager.drop(block)
    assert live_blocks(manager) == 1
    manager.release(block)
    assert (live_blocks(manager), kept_blocks(manager)) == (0, 0)


def test_capacity_moves_to_the_pool_that_needs_it() -> None:
    manager = make(10)
    keeper = keep(manager, take(manager, 10))
    manager.take_changes()
    take(manager, 2, OTHER)
    assert len(keeper.evicted) == 5
    changes = manager.take_changes()
    assert capacities(changes) == {KEY: 5, OTHER: 2}
    assert manager.capacity.claimed == 100


def test_shrinking_moves_pages_that_are_in_use_and_tells_from_where() -> None:
    manager = make(6)
    blocks = take(manager, 6)
    contents = {block.id: block for block in blocks}
    manager.release_all(blocks[:5])
    manager.take_changes()
    epoch = manager.capacity.epoch
    take(manager, 10, PACKED)
    (shrunk,) = [c for c in manager.take_changes() if isinstance(c, Resize) and c.pool == KEY]
    for source, target in shrunk.moves:
        contents[target] = contents.pop(source)
    assert contents[blocks[5].id] is blocks[5]
    assert blocks[5].id < shrunk.capacity
    assert manager.capacity.epoch > epoch


def test_several_pools_fit_together_or_not_at_all() -> None:
    manager = make(10)
    take(manager, 2)
    assert manager.can_allocate({KEY: 3, OTHER: 2})
    assert not manager.can_allocate({KEY: 4, OTHER: 2})
    assert len(take(manager, 3)) + len(take(manager, 2, OTHER)) == 5


def test_an_evicted_page_is_offered_to_the_disk_before_its_place_is_used_again() -> None:
    offered: list[tuple[bytes, int]] = []

    def wants(name: bytes, size: int) -> bool:
        offered.append((name, size))
        return name != b"page 1"

    manager = BlockManager(2 * BYTES[KEY], BYTES.__getitem__, wants)
    keep(manager, take(manager, 2))
    manager.take_changes()
    take(manager, 2)
    assert manager.take_changes() == (Spill(KEY, 0, b"page 0"),)
    assert offered == [(b"page 0", 10), (b"page 1", 20)]


@pytest.mark.parametrize("count", [1, 7])
def test_pools_that_nobody_uses_give_all_they_have(count: int) -> None:
    manager = BlockManager(75, BYTES.__getitem__)
    keep(manager, take(manager, count))
    take(manager, 3, OTHER)
    assert manager.capacity.usage()[KEY] == (0, 0, 0)


def test_after_a_reset_everything_is_there_again() -> None:
    manager = make(3)
    take(manager, 3)
    manager.reset()
    assert (manager.capacity.claimed, manager.take_changes()) == (0, ())
    assert len(take(manager, 3)) == 3
