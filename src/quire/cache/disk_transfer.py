"""Copies of blocks between the pools' arrays and the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import mlx.core as mx
import numpy as np

from quire.cache.blocks import Change, PoolKey, Resize, Restore, Spill
from quire.cache.host_block import HostBlock, block_bytes_of
from quire.cache.pools import Pools

SpillTo = Callable[[bytes, HostBlock], None]


def carry_out(
    changes: Iterable[Change],
    pools: Pools,
    spill: SpillTo | None,
    block: Callable[[bytes], HostBlock],
) -> None:
    """Apply the changes of a plan to the pools, in order, before its step.

    Args:
        spill: takes spilled blocks; None if no plan spills.
        block: returns the contents of a restored block by name.
    """
    for (_, pool), together in groupby(changes, key=lambda change: (type(change), change.pool)):
        run = list(together)
        spills = [change for change in run if isinstance(change, Spill)]
        restores = [change for change in run if isinstance(change, Restore)]
        for change in run:
            if isinstance(change, Resize):
                pools.resize(change)
        if spills and spill is not None:
            contents = _to_host(pools, pool, [change.id for change in spills])
            for change, spilled in zip(spills, contents, strict=True):
                spill(change.name, spilled)
        if restores:
            ids = [change.id for change in restores]
            pools.restore(pool, ids, _from_host([block(change.name) for change in restores]))


def matches_pool(pools: Pools, pool: PoolKey, block: HostBlock) -> bool:
    """Return whether contents have the types and shapes of a pool's blocks."""
    ours = [(_name(array.dtype), array.shape[1:]) for array in pools.export(pool, [])]
    theirs = [(dtype, array.shape[1:]) for dtype, array in block]
    return ours == theirs and block_bytes_of(block) == pools.block_bytes(pool)


def _to_host(pools: Pools, pool: PoolKey, ids: list[int]) -> list[HostBlock]:
    arrays = pools.export(pool, ids)
    # Evaluated here: a pool that a pending gather still reads could not be written in place.
    mx.eval(arrays)
    parts = []
    for array in arrays:
        bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        parts.append((_name(array.dtype), np.split(np.array(bits), len(ids))))
    return [tuple((dtype, blocks[n]) for dtype, blocks in parts) for n in range(len(ids))]


def _from_host(blocks: Sequence[HostBlock]) -> list[mx.array]:
    arrays = []
    for number, (dtype, _) in enumerate(blocks[0]):
        array = mx.array(np.concatenate([block[number][1] for block in blocks]))
        arrays.append(array.view(mx.bfloat16) if dtype == "bfloat16" else array)
    return arrays


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
