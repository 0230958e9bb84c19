"""Pools that grow, shrink and change hands keep their contents, and stay near the budget."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import Block, PoolKey, Resize
from quire.cache.pools import Pools
from quire.cache.specs import FullKV, RecurrentState, group_layers
from quire.core.kv_format import KVFormat

PLAIN, CODED = KVFormat(), KVFormat("uniform", 8, 8)
BUDGET = 8 << 20
KV = FullKV(2, 64)
_AT_ONCE = 16


class Marked:
    """Blocks of pools, each filled with a number of its own."""

    def __init__(self, layers: int) -> None:
        gc.collect()
        self.pools = Pools(group_layers((KV,) * layers), 16, mx.float32)
        self.manager = BlockManager(BUDGET, self.pools.claimed_bytes)
        self.marks: dict[Block, int] = {}
        mx.reset_peak_memory()
        self._before = mx.get_active_memory()

    @property
    def peak(self) -> float:
        """Peak of memory as a share of the budget."""
        return float(mx.get_peak_memory() - self._before) / BUDGET

    def fill(self, format: KVFormat, share: float) -> list[Block]:
        """Allocate blocks for a share of the budget, as sequences that grow do."""
        key, blocks = PoolKey(0, format), []
        for _ in range(int(share * BUDGET) // self.pools.block_bytes(key) // _AT_ONCE):
            more = self.manager.allocate(key, _AT_ONCE)
            assert more is not None, "the budget has room"
            for change in self.manager.take_changes():
                assert isinstance(change, Resize), "there is no disk tier"
                self.pools.resize(change)
            for block in more:
                self.marks[block] = len(self.marks) % 100 + 1
            numbers = mx.array([self.marks[block] for block in more])
            marks = mx.repeat(numbers, KV.kv_heads).reshape(-1, 1, 1)
            ids = [block.id for block in more]
            shapes = [(array.shape, array.dtype) for array in self.pools.export(key, ids)]
            contents = [mx.broadcast_to(marks.astype(type), shape) for shape, type in shapes]
            self.pools.restore(key, ids, contents)
            mx.eval(self.pools.arrays(range(8)))
            blocks += more
        return blocks

    def release(self, blocks: list[Block]) -> None:
        for block in blocks:
            del self.marks[block]
        self.manager.release_all(blocks)

    def intact(self) -> bool:
        """Return whether every block still holds its number."""
        for key in {block.pool for block in self.marks}:
            marks = {block.id: mark for block, mark in self.marks.items() if block.pool == key}
            expected = mx.repeat(mx.array(list(marks.values())), KV.kv_heads).reshape(-1, 1, 1)
            for array in self.pools.export(key, list(marks)):
                if not mx.all(array == expected):
                    return False
        return True


@pytest.mark.parametrize("layers", [1, 2, 4, 8])
def test_formats_share_the_budget_within_a_tenth(layers: int) -> None:
    marked = Marked(layers)
    plain = marked.fill(PLAIN, 0.98)
    assert marked.manager.capacity.claimed > 0.97 * BUDGET
    marked.release(plain[: len(plain) * 2 // 3])
    marked.fill(CODED, 0.6)
    marked.release(plain[len(plain) * 2 // 3 :])
    marked.fill(PLAIN, 0.3)
    peak = marked.peak  # comparing takes memory, too
    assert marked.intact()
    assert peak < 1.1


def test_states_that_may_not_be_held_twice_keep_their_contents() -> None:
    state = RecurrentState((("conv", (3, 8), ""), ("ssm", (8, 16), "float32")))
    pools = Pools(group_layers((state, state)), 16, mx.bfloat16)
    key = PoolKey(0, PLAIN)
    pools.resize(Resize(key, 4))
    given = [mx.random.normal((4, *a.shape[1:])).astype(a.dtype) for a in pools.arrays(range(2))]
    pools.restore(key, [0, 1, 2, 3], given)
    pools.resize(Resize(key, 9, spare=0))
    pools.resize(Resize(key, 3, ((3, 1),), spare=0))
    kept = pools.export(key, [0, 1, 2])
    for before, after in zip(given, kept, strict=True):
        assert mx.array_equal(after, before[mx.array([0, 3, 2])])
    pools.resize(Resize(key, 5, spare=0))
    new = pools.export(key, [3, 4])
    assert all(mx.isfinite(array).all() for array in new), "new blocks are numbers"
