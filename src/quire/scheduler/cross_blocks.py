"""Blocks for the keys and values of media that cross-attention layers read. Pure Python.

Their contents depend on the media alone, so all sequences that attend to an item share its blocks.
A sequence holds them while tokens that it has yet to compute attend to the item. The first step
that needs them computes their contents. Released blocks stay cached until their room is needed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import Block, PoolKey
from quire.cache.specs import KVGroup, cross_groups
from quire.core.media import CrossMedia
from quire.scheduler.cross_entry import CrossEntry, Key
from quire.scheduler.plan import CrossKeys
from quire.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Missing:
    """A media list that a sequence is about to attend to and that has no blocks yet."""

    number: int
    media: CrossMedia
    key: Key


class CrossBlocks:
    """Owner of all cross-attention blocks, and the only writer of `SequenceBlocks.cross`.

    Args:
        block_size: keys a block.
    """

    def __init__(self, groups: tuple[KVGroup, ...], manager: BlockManager, block_size: int) -> None:
        self._groups = cross_groups(groups)
        self._manager = manager
        self._size = block_size
        self._entries: dict[Key, CrossEntry] = {}

    def hold(self, sequence: Sequence, end: int) -> list[_Missing]:
        """Give the sequence the cached entries that its tokens up to `end` attend to.

        Returns:
            The media lists without an entry: `wanted` counts their blocks, `take` makes entries.
        """
        missing = []
        for number, media in enumerate(sequence.cross_media):
            if number in sequence.blocks.cross or not media.within(sequence.progress.computed, end):
                continue
            key = (sequence.prefix.identity, *(item.digest for item in media.items))
            entry = self._entries.get(key)
            if entry is None:
                missing.append(_Missing(number, media, key))
                continue
            for block in entry.all:
                self._manager.retain(block)
            entry.users += 1
            sequence.blocks.cross[number] = entry
        return missing

    def written(self, sequence: Sequence, number: int) -> bool:
        """Return whether a planned or finished step computes the keys of a media list.

        Args:
            number: the list's index in `Sequence.cross_media`.
        """
        entry = sequence.blocks.cross.get(number)
        if entry is None:
            items = sequence.cross_media[number].items
            entry = self._entries.get((sequence.prefix.identity, *(each.digest for each in items)))
        return entry is not None and entry.written

    def wanted(self, sequence: Sequence, missing: Seq[_Missing]) -> dict[PoolKey, int]:
        """Return how many blocks the missing entries need, by pool."""
        count = sum(-(-each.media.keys // self._size) for each in missing)
        return {PoolKey(group, sequence.format): count for group in self._groups} if count else {}

    def take(
        self, sequence: Sequence, missing: Seq[_Missing], fresh: dict[PoolKey, list[Block]]
    ) -> None:
        """Make the missing entries from blocks of `fresh`, which is mutated."""
        pools = {group: fresh.pop(PoolKey(group, sequence.format)) for group in self._groups}
        for each in missing:
            count = -(-each.media.keys // self._size)
            blocks = {group: [pool.pop() for _ in range(count)] for group, pool in pools.items()}
            entry = CrossEntry(self._forget, each.key, blocks)
            sequence.blocks.cross[each.number] = self._entries[each.key] = entry

    def placed(self, sequence: Sequence, start: int, end: int) -> tuple[CrossKeys, ...]:
        """Return a snapshot of the entries that the tokens `[start, end)` attend to.

        The first caller that needs an unwritten entry computes it: the entry becomes written.
        """
        found = []
        for number, entry in sorted(sequence.blocks.cross.items()):
            media = sequence.cross_media[number]
            rows = media.within(start, end)
            if not rows:
                continue
            tables = {group: [each.id for each in own] for group, own in entry.blocks.items()}
            found.append(CrossKeys(rows, media, tables=tables, writes=not entry.written))
            if not entry.written:
                entry.written = True
                for block in entry.all:
                    self._manager.keep(block, entry)
        return tuple(found)

    def release_passed(self, sequence: Sequence) -> None:
        """Release the entries that no token yet to be computed attends to."""
        certain = sequence.progress.certain
        for number in list(sequence.blocks.cross):
            end = sequence.cross_media[number].end
            if end is not None and end <= certain:
                self._release(sequence.blocks.cross.pop(number))

    def release(self, sequence: Sequence) -> None:
        """Release all entries of a sequence."""
        for entry in sequence.blocks.cross.values():
            self._release(entry)
        sequence.blocks.cross.clear()

    def _forget(self, entry: CrossEntry, evicted: Block) -> None:
        """Drop an entry and its other blocks, because one block is being evicted."""
        self._entries.pop(entry.key, None)
        for block in entry.all:
            if block is not evicted:
                self._manager.drop(block)

    def clear(self) -> None:
        """Forget all entries. The caller has dropped all blocks."""
        self._entries.clear()

    def _release(self, entry: CrossEntry) -> None:
        entry.users -= 1
        if not entry.users and not entry.written:  # no step has been planned that computes it
            self._entries.pop(entry.key, None)
        self._manager.release_all(entry.all)
