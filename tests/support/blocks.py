"""Counts of blocks, over all pools."""

from __future__ import annotations

from quire.cache.block_manager import BlockManager


def live_blocks(manager: BlockManager) -> int:
    """Return how many somebody uses."""
    return sum(pool.live for pool in manager.capacity.pools.values())


def kept_blocks(manager: BlockManager) -> int:
    """Return the number of cached blocks that no sequence uses."""
    return sum(len(pool.kept) for pool in manager.capacity.pools.values())
