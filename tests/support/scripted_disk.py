"""A disk tier whose delays and losses a test decides; steps stand for time."""

from __future__ import annotations

import random

import numpy as np

from quire.cache.disk_tier import PendingRead
from quire.cache.host_block import HostBlock


def as_host_block(content: dict[int, int]) -> HostBlock:
    """Return a simulated block as arrays."""
    return (("int64", np.array(sorted(content.items()), dtype=np.int64).reshape(-1, 2)),)


def from_host_block(block: HostBlock) -> dict[int, int]:
    """Return what `as_host_block` was given."""
    return {int(place): int(token) for place, token in block[0][1]}


class ScriptedDisk:
    """Implements `disk_prefetch.Tier`, and takes blocks.

    Args:
        loses: share of the reads of a block that find nothing, and of blocks that are not taken.
        hangs: share of reads that never end.
    """

    def __init__(self, seed: int, *, loses: float = 0.0, hangs: float = 0.0) -> None:
        self.held: dict[bytes, HostBlock] = {}
        self.hits = 0
        self._rng = random.Random(seed)
        self._loses, self._hangs = loses, hangs
        self._reads: list[tuple[int, PendingRead]] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self.held

    def accepts(self, key: bytes, size: int) -> bool:
        return key not in self.held and self._rng.random() >= self._loses

    def spill(self, key: bytes, block: HostBlock) -> None:
        known = self.held.setdefault(key, block)
        assert from_host_block(known) == from_host_block(block), "one name, two contents"

    def read(self, keys: tuple[bytes, ...]) -> PendingRead:
        assert keys, "nothing is no reading"
        read = PendingRead(keys)
        steps = 10**9 if self._rng.random() < self._hangs else self._rng.randrange(6)
        self._reads.append((steps, read))
        return read

    def seconds(self, size: int) -> float:
        return 0.01

    def decline(self) -> None:
        pass

    def tick(self) -> None:
        """One step passes."""
        self._reads = [(steps - 1, read) for steps, read in self._reads]
        for steps, read in self._reads:
            if steps < 0 and not read.done:
                for key in read.keys:
                    if self._rng.random() < self._loses:
                        self.held.pop(key, None)
                    elif key in self.held:
                        read.blocks[key] = self.held[key]
                        self.hits += 1
                read.done = True
        self._reads = [(steps, read) for steps, read in self._reads if not read.done]
