"""Pools in memory that grows: no array is copied, and blocks keep their contents and places."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import Block, PoolKey, Resize
from quire.cache.formats import paging
from quire.cache.pools import Pools
from quire.cache.specs import FullKV, KVGroup, RecurrentState, WindowKV, group_layers
from quire.core.kv_format import KVFormat
from quire.device.device import current_device
from tests.support.emulated_steps import memory_of
from tests.support.growing import SlicedMemory

PLAIN, PAGE = KVFormat(), KVFormat("page", 4, 4)
STATE = RecurrentState((("conv", (3, 8), ""), ("ssm", (8, 16), "float32")))
KEYS = [
    pytest.param((FullKV(2, 64), WindowKV(2, 64, 32)), PoolKey(0, PLAIN), id="plain"),
    pytest.param((FullKV(2, 64), WindowKV(2, 64, 32)), PoolKey(1, PLAIN), id="a second group"),
    pytest.param((FullKV(2, 64), FullKV(2, 64)), PoolKey(0, PAGE), id="codes"),
    pytest.param((FullKV(2, 64), FullKV(2, 64)), PoolKey(0, PAGE, tail=True), id="tails"),
    pytest.param((STATE, FullKV(2, 64)), PoolKey(0, PLAIN), id="states"),
]
Layers = tuple[FullKV | WindowKV | RecurrentState, ...]


def opened(layers: Layers) -> tuple[Pools, BlockManager]:
    groups: tuple[KVGroup, ...] = group_layers(layers)
    pools = Pools(groups, 64, mx.float32)
    budget = 4 << 20
    return pools, BlockManager(budget, pools.claimed_bytes, growth_bytes=lambda key: budget // 8)


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[SlicedMemory]:
    """Let pools grow in place; return the memories of all pools that are made."""
    made: list[SlicedMemory] = []

    def new() -> SlicedMemory:
        made.append(SlicedMemory())
        return made[-1]

    monkeypatch.setattr(current_device(), "growing_memory", new)
    return made


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the rows of each array that is copied to be resized."""
    rows: list[int] = []
    copied = paging._copied

    def counted(array: mx.array, wanted: int) -> mx.array:
        rows.append(len(array))
        return copied(array, wanted)

    monkeypatch.setattr(paging, "_copied", counted)
    return rows


def own_arrays(pools: Pools, key: PoolKey) -> list[mx.array]:
    if key.group in pools._recurrent:
        return pools.states(key.group, key.format).arrays()
    found: list[mx.array] = []
    for store in pools.kv(key.group, key.format).layers.values():
        lists = [store.own_tails()] if key.tail else store.block_arrays
        found += [array for arrays in lists for array in arrays]
    return found


@pytest.mark.parametrize(("layers", "key"), KEYS)
def test_a_pool_that_grows_to_its_budget_copies_nothing(
    layers: Layers, key: PoolKey, memories: list[SlicedMemory], copies: list[int]
) -> None:
    pools, manager = opened(layers)
    places: list[int] = []
    growths, marked = 0, 0
    while (blocks := manager.allocate(key, 1)) is not None:
        for change in manager.take_changes():
            assert isinstance(change, Resize)
            assert not pools.moves_arrays(change)
            pools.resize(change)
            growths += 1
            arrays = own_arrays(pools, key)
            now = [int(memory_of(each).ctypes.data) for each in arrays]
            assert places in ([], now), "an array moved"
            places = now
        for array in own_arrays(pools, key):
            rows = memory_of(array).reshape(manager.capacity.pool(key).capacity, -1)
            rows[blocks[0].id] = 1 + blocks[0].id % 100
        marked += 1
    assert growths > 3
    assert manager.capacity.claimed > 0.9 * manager.capacity.budget
    assert not copies
    assert sum(each.copied for each in memories) == 0
    for array in own_arrays(pools, key):
        rows = memory_of(array).reshape(marked, -1)
        assert all((rows[n] == 1 + n % 100).all() for n in range(marked))


def test_a_pool_grows_by_equal_parts_of_the_budget() -> None:
    manager = BlockManager(800, lambda key: 1, growth_bytes=lambda key: 100)
    found = []
    for _ in range(8):
        assert manager.allocate(PoolKey(0, PLAIN), 100) is not None
        found += [each.capacity for each in manager.take_changes() if isinstance(each, Resize)]
    assert found == [100, 200, 300, 400, 500, 600, 700, 800]


def test_a_pool_gives_memory_to_another_and_keeps_its_contents(
    memories: list[SlicedMemory], copies: list[int]
) -> None:
    pools, manager = opened((FullKV(2, 64), WindowKV(2, 64, 32)))
    large, other = PoolKey(0, PLAIN), PoolKey(1, PLAIN)
    room = manager.capacity.budget // manager.capacity.block_bytes(large)

    def allocate(key: PoolKey, count: int) -> list[Block]:
        blocks = manager.allocate(key, count)
        assert blocks is not None, "the budget has room"
        for change in manager.take_changes():
            assert isinstance(change, Resize), "there is no disk tier"
            pools.resize(change)
        return blocks

    blocks = allocate(large, room)
    manager.release_all(blocks[: room // 2])
    kept = blocks[room // 2 :]
    shapes = [each.shape for each in pools.export(large, [block.id for block in kept])]
    contents = [mx.random.normal(shape) for shape in shapes]
    pools.restore(large, [block.id for block in kept], contents)
    allocate(other, room // 4)
    assert manager.capacity.pool(large).capacity < room
    found = pools.export(large, [block.id for block in kept])
    assert all(map(mx.array_equal, found, contents))
    assert not copies


def test_memory_of_an_array_that_was_copied_elsewhere_is_freed(
    memories: list[SlicedMemory],
) -> None:
    pools, _ = opened((FullKV(2, 64),))
    key = PoolKey(0, PLAIN)
    pools.resize(Resize(key, 4, most=16, grows=True))
    assert memories[-1].ranges == 2
    arrays = pools.arrays()
    copy = mx.array(arrays[0]) + 0
    pools.replace(iter([copy, arrays[1]]))
    pools.resize(Resize(key, 8, most=16, grows=True))
    assert memories[-1].ranges == 2
    assert memories[-1].copied == 1


def test_forgotten_pools_free_their_memory(memories: list[SlicedMemory]) -> None:
    pools, _ = opened((FullKV(2, 64),))
    pools.resize(Resize(PoolKey(0, PLAIN), 4, most=16, grows=True))
    pools.clear()
    assert memories[-1].ranges == 0
    assert pools._memory is memories[-1]
