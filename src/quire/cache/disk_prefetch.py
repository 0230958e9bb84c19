"""Decides which part of a prompt is worth reading from disk, and reads it into memory.

A prompt's start is read if it is on disk, or partly in memory, for every group: full attention
needs all blocks, a window those that cover it before the boundary, a recurrent layer its state at
the boundary. Blocks that were read are entered in the prefix index as if they had stayed in memory;
the ordinary match then finds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import Block, PoolKey
from quire.cache.disk_tier import PendingRead
from quire.cache.host_block import HostBlock
from quire.cache.index import Node, PrefixIndex
from quire.cache.specs import recurrent_groups
from quire.core.block_keys import lasting_name
from quire.core.kv_format import KVFormat

_READ_BYTES = 256 << 20
"""Most bytes per read. Longer prefixes are read in pieces, which bounds the host's memory."""
_MIN_TIMEOUT_S, _TIMEOUT_FACTOR = 2.0, 4
"""A request waits for the disk at most this many seconds plus this multiple of the estimate."""


class Tier(Protocol):
    """The disk tier as prefetching uses it."""

    def __contains__(self, key: bytes) -> bool: ...

    def read(self, keys: tuple[bytes, ...]) -> PendingRead:
        """Start reading blocks."""
        ...

    def seconds(self, size: int) -> float:
        """Return the expected seconds for reading so many bytes."""
        ...

    def decline(self) -> None:
        """Record that a read was not worth its time."""
        ...


@dataclass(frozen=True, slots=True)
class WantedPrefix:
    """The prompt whose cached prefix is requested.

    Attributes:
        keys: chained hashes of the full blocks that may be reused.
    """

    identity: bytes
    format: KVFormat
    tokens: Sequence[int]
    keys: Sequence[bytes]


@dataclass(slots=True, weakref_slot=True)
class PrefetchedPart:
    """A part of a prefix that is being read. Sequences with the same prefix share it.

    Attributes:
        end: block number up to which missing blocks are read.
        groups: by block number, the groups whose blocks are read.
        until: time at which to give up.
        failed: whether the blocks had no room or no use, so that asking again would not help.
    """

    prompt: WantedPrefix
    end: int
    groups: dict[int, list[int]]
    read: PendingRead
    until: float
    settled: bool = False
    failed: bool = False


class DiskPrefetch:
    """Reader of cached starts from the disk tier. Owned by the scheduler.

    Args:
        tier: the disk tier.
        matches_pool: returns whether contents have the shape of a pool's blocks.
        hold_block: keeps a block's contents by name, until the next plan restores it.
        compute_seconds: returns the seconds for computing so many prompt tokens; None if unknown.
        clock: returns seconds.
    """

    def __init__(
        self,
        index: PrefixIndex,
        manager: BlockManager,
        tier: Tier,
        matches_pool: Callable[[PoolKey, HostBlock], bool],
        hold_block: Callable[[bytes, HostBlock], None],
        compute_seconds: Callable[[int], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index, self._manager, self._tier = index, manager, tier
        self._matches_pool, self._hold_block = matches_pool, hold_block
        self._compute_seconds = compute_seconds
        self._clock = clock
        self._states = frozenset(recurrent_groups(index.groups))
        self._under_way: WeakValueDictionary[bytes, PrefetchedPart] = WeakValueDictionary()

    def start(
        self, prompt: WantedPrefix, matched: int, before: PrefetchedPart | None
    ) -> PrefetchedPart | None:
        """Start reading the tokens after `matched` if that is faster than computing them.

        Args:
            before: the prompt's last reading; its time limit is not renewed.
        """
        if before is not None and (before.failed or self._clock() >= before.until):
            return None
        size = self._index.block_size
        path = self._index.path(prompt.identity, prompt.keys)
        boundary = self._boundary(prompt, path, matched // size)
        if boundary is None:
            return None
        under_way = self._under_way.get(prompt.keys[boundary - 1])
        if under_way is not None and not under_way.settled:
            return under_way
        missing = self._missing(prompt, path, boundary)
        wanted = [(g, n) for n, groups in missing.items() for g in groups]
        bytes_ = sum(self._bytes(prompt, group) for group, _ in wanted)
        seconds = self._tier.seconds(bytes_)
        compute = self._compute_seconds(boundary * size - matched)
        if compute is not None and seconds >= compute:
            self._tier.decline()
            return None
        until = self._clock() + _MIN_TIMEOUT_S + _TIMEOUT_FACTOR * seconds
        end, part = self._first_part(prompt, missing, boundary)
        names = [lasting_name(prompt.keys[n], g) for n, groups in part.items() for g in groups]
        reading = PrefetchedPart(
            prompt,
            end,
            groups=part,
            read=self._tier.read(tuple(names)),
            until=until if before is None else before.until,
        )
        self._under_way[prompt.keys[boundary - 1]] = reading
        return reading

    def settle(self, reading: PrefetchedPart) -> bool:
        """Return whether a read has ended. If so, its blocks are in the index."""
        if reading.settled:
            return True
        if not reading.read.done:
            if self._clock() < reading.until:
                return False
            reading.read.cancelled = True
            reading.failed = True
        else:
            self._restore(reading)
        reading.settled = True
        return True

    # -- what to read --------------------------------------------------------------------------

    def _boundary(self, prompt: WantedPrefix, path: list[Node], matched: int) -> int | None:
        """Return the largest number of blocks, beyond `matched`, for which every group has its
        needs.
        """
        size = self._index.block_size
        groups, anchors = self._index.groups, self._index.anchors
        unbroken = {group.index: 0 for group in groups}
        best = None
        # Of the blocks before `matched`, only those matter that a window beyond it still shows.
        passing = [group.spec for group in groups if group.index not in anchors]
        shown = [spec.first_needed((matched + 1) * size) // size for spec in passing]
        start = min([matched, *shown])
        for number in range(start, len(prompt.keys)):
            complete = True
            for group in groups:
                there = self._in_memory(path, number, group.index) or (
                    lasting_name(prompt.keys[number], group.index) in self._tier
                )
                unbroken[group.index] = unbroken[group.index] + 1 if there else 0
                if group.index in anchors and not there:
                    return best
                first = max(start, group.spec.first_needed((number + 1) * size) // size)
                complete = complete and unbroken[group.index] >= number + 1 - first
            if complete and number + 1 > matched:
                best = number + 1
        return best

    def _missing(
        self, prompt: WantedPrefix, path: list[Node], boundary: int
    ) -> dict[int, list[int]]:
        """Return, by block number, the groups whose blocks must be read to start at `boundary`."""
        size = self._index.block_size
        missing: dict[int, list[int]] = {}
        for number in range(boundary):
            for group in self._index.groups:
                first = group.spec.first_needed(boundary * size) // size
                if number >= first and not self._in_memory(path, number, group.index):
                    missing.setdefault(number, []).append(group.index)
        return missing

    def _in_memory(self, path: list[Node], number: int, group: int) -> bool:
        if number >= len(path):
            return False
        node = path[number]
        return group in node.blocks or (group, self._index.block_size) in node.snapshots

    def _first_part(
        self, prompt: WantedPrefix, missing: dict[int, list[int]], boundary: int
    ) -> tuple[int, dict[int, list[int]]]:
        """Return as many whole blocks as may be read at once, at least one, and their end."""
        part: dict[int, list[int]] = {}
        total = 0
        for number, groups in missing.items():
            total += sum(self._bytes(prompt, group) for group in groups)
            if part and total > _READ_BYTES:
                return number, part
            part[number] = groups
        return boundary, part

    def _bytes(self, prompt: WantedPrefix, group: int) -> int:
        return self._manager.capacity.block_bytes(PoolKey(group, prompt.format))

    # -- back into memory ----------------------------------------------------------------------

    def _restore(self, reading: PrefetchedPart) -> None:
        """Enter the read blocks in the index."""
        path = self._index.path(reading.prompt.identity, reading.prompt.keys)
        # Room for what comes must not be made by evicting what it continues.
        held = [
            block for node in path for block in (*node.blocks.values(), *node.snapshots.values())
        ]
        for block in held:
            self._manager.retain(block)
        fresh: list[Block] = []
        self._enter(reading, path, fresh)
        self._manager.release_all(fresh)
        self._manager.release_all(held)

    def _enter(self, reading: PrefetchedPart, path: list[Node], fresh: list[Block]) -> None:
        """Create nodes and blocks up to the first that is missing or has no room."""
        prompt, size = reading.prompt, self._index.block_size
        node = self._index.root(prompt.identity)
        for number in range(reading.end):
            groups = reading.groups.get(number, [])
            if not groups and number < len(path):
                node = path[number]
                continue
            blocks = self._blocks(reading, number, groups)
            if blocks is None:
                break
            fresh.extend(blocks.values())
            states = {g: p for g, p in blocks.items() if g in self._states}
            vectors = {g: p for g, p in blocks.items() if g not in self._states}
            tokens = tuple(prompt.tokens[number * size : (number + 1) * size])
            entered = self._index.insert(node, prompt.keys[number], tokens, blocks=vectors)
            if entered is None:  # what this block continues was evicted meanwhile
                break
            for block in states.values():
                self._index.insert_snapshot(entered, size, block)
            node = entered
        self._index.prune(node)

    def _blocks(
        self, reading: PrefetchedPart, number: int, groups: list[int]
    ) -> dict[int, Block] | None:
        """Return new blocks for a block number; None if any is missing or does not fit."""
        prompt, blocks = reading.prompt, {}
        for group in groups:
            pool = PoolKey(group, prompt.format)
            name = lasting_name(prompt.keys[number], group)
            contents = reading.read.blocks.get(name)
            if contents is None:
                break
            got = self._manager.allocate(pool, 1) if self._matches_pool(pool, contents) else None
            if got is None:
                reading.failed = True
                break
            blocks[group] = got[0]
            self._hold_block(name, contents)
            self._manager.restore(got[0], name)
        if len(blocks) == len(groups):
            return blocks
        self._manager.release_all(blocks.values())
        return None
