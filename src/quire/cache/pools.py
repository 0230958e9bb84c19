"""The arrays that hold the blocks of each group and format: the block manager's device side."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import islice

import mlx.core as mx
import numpy as np

from quire.cache.blocks import PoolKey, Resize
from quire.cache.formats.base import LayerShape, LayerStore
from quire.cache.formats.paging import ANY_ROOM, Room, block_rows
from quire.cache.formats.registry import block_bytes, make_index_store, make_store, store_type
from quire.cache.specs import KVGroup, recurrent_groups, stored_groups
from quire.cache.states import StatePool
from quire.core.arrays import Ints
from quire.core.kv_format import KVFormat
from quire.device.cache_operations import RowCopies
from quire.device.device import current_device
from quire.device.growing_memory import GrowingMemory

_PAGES = 32
"""Fewest pages that each array of a pool has in the whole budget, where it grows in place."""


class KVPool:
    """The layers of one group in one format.

    Attributes:
        layers: the stores of keys and values, by layer.
        indexes: the stores of indexers' keys by layer, with the same block ids; empty without
            indexers.
    """

    def __init__(self, layers: tuple[int, ...], shape: LayerShape, format: KVFormat) -> None:
        self.layers = {layer: make_store(shape, format.of_layer(layer)) for layer in layers}
        stores = {layer: make_index_store(shape) for layer in layers}
        self.indexes = {layer: store for layer, store in stores.items() if store is not None}
        both = (*self.layers.items(), *self.indexes.items())
        self._arrays = [(layer, arrays) for layer, store in both for arrays in store.lists]
        """The lists of every store's arrays, which the store changes in place, by layer."""

    def resize(
        self,
        capacity: int,
        moves: tuple[tuple[int, int], ...],
        room: Room = ANY_ROOM,
        *,
        tails: bool,
    ) -> None:
        """Resize the arrays as the block manager decided; see `Resize`."""
        for store in self._stores():
            if not tails:
                store.resize(capacity, moves, room)
            elif store.has_tail:
                store.resize_tails(capacity, moves, room)

    def arrays(self, layers: Container[int] | None = None) -> list[mx.array]:
        """Return every array of these layers; of all by default."""
        found: list[mx.array] = []
        for layer, arrays in self._arrays:
            if layers is None or layer in layers:
                found += arrays
        return found

    def replace(self, others: Iterator[mx.array]) -> None:
        """Take other arrays in place of all that `arrays` returns."""
        for _, arrays in self._arrays:
            arrays[:] = islice(others, len(arrays))

    def export(self, blocks: Ints) -> list[mx.array]:
        """Return the contents of blocks in all layers (lazy)."""
        return [array for store in self._stores() for array in store.export(blocks)]

    def restore(self, blocks: Ints, contents: list[mx.array]) -> None:
        """Write contents that `export` returned into blocks."""
        at = 0
        for store in self._stores():
            parts = len(store.export(blocks[:0]))
            store.restore(blocks, contents[at : at + parts])
            at += parts

    def copies(self, sources: Ints, targets: Ints) -> list[RowCopies]:
        """Return the rows to copy for blocks `targets` to become copies of `sources`."""
        by_heads: dict[int, list[mx.array]] = {}
        for store in self._stores():
            for arrays in store.block_arrays:
                by_heads.setdefault(store.shape.kv_heads, []).extend(arrays)
        return [
            RowCopies(arrays, block_rows(sources, heads), block_rows(targets, heads))
            for heads, arrays in by_heads.items()
        ]

    def _stores(self) -> list[LayerStore]:
        return [*self.layers.values(), *self.indexes.values()]


class Pools:
    """All pools of a model. Each is created at first use, so that unused formats cost nothing.

    Args:
        dtype: the model's type.
    """

    def __init__(self, groups: tuple[KVGroup, ...], block_size: int, dtype: mx.Dtype) -> None:
        self.groups = groups
        self._stored = stored_groups(groups)
        self._recurrent = recurrent_groups(groups)
        self.block_size = block_size
        self.dtype = dtype
        self._memory = current_device().growing_memory()
        self._kv: dict[tuple[int, KVFormat], KVPool] = {}
        self._states: dict[tuple[int, KVFormat], StatePool] = {}

    def block_bytes(self, key: PoolKey) -> int:
        """Return the bytes of one block of a pool, over all layers of its group."""
        group = self.groups[key.group]
        state = self._recurrent.get(key.group)
        if state is not None:
            return StatePool.slot_bytes(len(group.layers), state, self.dtype)
        shape = self.shape(key.group)
        total = 0
        for layer in group.layers:
            format = key.format.of_layer(layer)
            size = store_type(format).tail_bytes if key.tail else block_bytes
            total += size(shape, format)
        return total

    def claimed_bytes(self, key: PoolKey) -> int:
        """Return the bytes of the budget that one block of a pool claims.

        Where a step copies the arrays that it reads and then writes, tails and states, one layer's
        are held twice meanwhile. The copy counts.
        """
        claimed = self.block_bytes(key)
        copied = key.tail or key.group in self._recurrent
        layers = len(self.groups[key.group].layers)
        if not copied or not layers or current_device().operations.rows_in_place:
            return claimed
        return claimed + -(-claimed // layers)

    def kv(self, group: int, format: KVFormat) -> KVPool:
        """Return the pool of a group of keys and values."""
        pool = self._kv.get((group, format))
        if pool is None:
            pool = KVPool(self.groups[group].layers, self.shape(group), format)
            self._kv[group, format] = pool
        return pool

    def states(self, group: int, format: KVFormat) -> StatePool:
        """Return the pool of a recurrent group."""
        pool = self._states.get((group, format))
        if pool is None:
            layers = self.groups[group].layers
            pool = StatePool(layers, self._recurrent[group], self.dtype)
            self._states[group, format] = pool
        return pool

    def resize(self, change: Resize) -> None:
        """Resize a pool's arrays as the block manager decided."""
        memory = self._memory_for(change)
        room = Room(change.spare, memory, change.most)
        key, wanted = change.pool, (change.capacity, change.moves, room)
        if key.group in self._recurrent:
            self.states(key.group, key.format).resize(*wanted)
        else:
            self.kv(key.group, key.format).resize(*wanted, tails=key.tail)
        if memory is None:
            mx.clear_cache()  # MLX would keep freed arrays, whose sizes no array asks for again
        self.free_copied()

    def free_copied(self) -> None:
        """Free the growing memory of arrays that MLX has copied instead of writing to them."""
        if self._memory is not None:
            arrays = self.arrays()
            mx.async_eval(arrays)  # those that are not computed have no addresses
            self._memory.keep(arrays)

    def moves_arrays(self, change: Resize) -> bool:
        """Return whether a resize moves arrays or takes memory away, which no step may use then."""
        return bool(change.moves) or not change.grows or self._memory_for(change) is None

    def grows_in_place(self, key: PoolKey, budget: int) -> bool:
        """Return whether a pool grows without being copied.

        Not so pools whose arrays, each rounded up to pages, would take much more than the budget.

        Args:
            budget: bytes that the pool may claim at most.
        """
        if self._memory is None:
            return False
        return budget >= _PAGES * self._memory.page_bytes * len(self._pool(key).arrays())

    def _memory_for(self, change: Resize) -> GrowingMemory | None:
        """Return the memory in which a pool grows; None if it is copied to grow."""
        budget = change.most * self.block_bytes(change.pool)
        return self._memory if self.grows_in_place(change.pool, budget) else None

    def copy(self, pairs: Iterable[tuple[PoolKey, int, int]]) -> None:
        """Copy block `from` to block `to` for each (pool, from, to)."""
        by_pool: dict[PoolKey, list[tuple[int, int]]] = {}
        for pool, source, target in pairs:
            by_pool.setdefault(pool, []).append((source, target))
        copies: list[RowCopies] = []
        for key, ids in by_pool.items():
            sources, targets = np.array(ids, dtype=np.int32).T
            copies += self._pool(key).copies(sources, targets)
        current_device().operations.copy_rows(copies)

    def rehearse(self) -> None:
        """Copy each pool's first block onto itself, so that a GPU compiles the kernels of
        copies.
        """
        block = np.zeros(1, dtype=np.int32)
        copies = [each for pool in self._all for each in pool.copies(block, block)]
        current_device().operations.copy_rows(
            [each for each in copies if all(map(len, each.pools))]
        )

    def export(self, key: PoolKey, ids: list[int]) -> list[mx.array]:
        """Return the (lazy) contents of blocks in all layers, block by block on the first axis."""
        return self._pool(key).export(np.array(ids, dtype=np.int32))

    def restore(self, key: PoolKey, ids: list[int], contents: list[mx.array]) -> None:
        """Write contents that `export` returned into blocks."""
        self._pool(key).restore(np.array(ids, dtype=np.int32), contents)

    def clear(self) -> None:
        """Forget all blocks, as `BlockManager.reset` does."""
        self._kv.clear()
        self._states.clear()
        self._memory = current_device().growing_memory()  # frees the former arrays'

    def arrays(self, layers: Container[int] | None = None) -> list[mx.array]:
        """Return every array of these layers, in all pools; of all layers by default."""
        return [array for pool in self._all for array in pool.arrays(layers)]

    def replace(self, others: Iterator[mx.array]) -> None:
        """Take other arrays in place of those that `arrays` returns for all layers."""
        for pool in self._all:
            pool.replace(others)

    def shape(self, group: int) -> LayerShape:
        """Return the shape that each layer of an attention group stores."""
        return LayerShape.of(self._stored[group], self.block_size, self.dtype)

    @property
    def _all(self) -> list[KVPool | StatePool]:
        return [*self._kv.values(), *self._states.values()]

    def _pool(self, key: PoolKey) -> KVPool | StatePool:
        if key.group in self._recurrent:
            return self.states(key.group, key.format)
        return self.kv(key.group, key.format)
