"""Blocks of the keys and values of media that sequences attend to. Pure Python.

They depend on the media alone, so an item's blocks serve every sequence that attends to it, and are
kept when nobody does, until their room is needed. A sequence holds them while some of its tokens to
compute attend to them; the step that needs them first computes what is in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import Block, PoolKey
from quire.cache.specs import KVGroup, cross_groups
from quire.core.media import CrossMedia
from quire.scheduler.plan import CrossKeys
from quire.scheduler.sequence import Sequence

Key = tuple[bytes, ...]
"""The identity of a sequence's blocks (model, format, salt), and the items' digests."""


class CrossEntry:
    """The blocks of some items' keys, by group. Implements `cache.blocks.Holder`.

    Attributes:
        users: sequences that hold it.
        written: whether a step computes, or has computed, what is in the blocks.
    """

    __slots__ = ("_owner", "blocks", "key", "users", "written")

    def __init__(self, owner: CrossBlocks, key: Key, blocks: dict[int, list[Block]]) -> None:
        self._owner = owner
        self.key = key
        self.blocks = blocks
        self.users = 1
        self.written = False

    @property
    def all(self) -> list[Block]:
        """Those of all groups."""
        return [block for blocks in self.blocks.values() for block in blocks]

    def name(self, block: Block) -> bytes | None:
        """None: no disk keeps them."""
        return None

    def tokens_in(self, block: Block) -> int:
        """None of the block is ever written anew."""
        return 0

    def lost_with(self, block: Block) -> Iterable[Block]:
        """One block alone is worth nothing."""
        return self.all

    def forget(self, block: Block) -> None:
        """See `Holder.forget`; the other blocks go with it."""
        self._owner.forget(self, block)


@dataclass(frozen=True, slots=True)
class _Missing:
    """What a sequence is about to attend to, and nobody has."""

    number: int
    media: CrossMedia
    key: Key


class CrossBlocks:
    """The one writer of what sequences hold of media's keys.

    Args:
        block_size: keys a block.
    """

    def __init__(self, groups: tuple[KVGroup, ...], manager: BlockManager, block_size: int) -> None:
        self._groups = cross_groups(groups)
        self._manager = manager
        self._size = block_size
        self._entries: dict[Key, CrossEntry] = {}

    def hold(self, sequence: Sequence, end: int) -> list[_Missing]:
        """Holds what the sequence's tokens up to `end` attend to, as far as it is there.

        Returns:
            What is not there. It needs blocks, see `wanted`, and then `take`.
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
        """Whether the keys of an item list, by its number in `Sequence.cross_media`, are computed,
        or a planned step computes them."""
        entry = sequence.blocks.cross.get(number)
        if entry is None:
            items = sequence.cross_media[number].items
            entry = self._entries.get((sequence.prefix.identity, *(each.digest for each in items)))
        return entry is not None and entry.written

    def wanted(self, sequence: Sequence, missing: Seq[_Missing]) -> dict[PoolKey, int]:
        """How many blocks are needed, by pool."""
        count = sum(-(-each.media.keys // self._size) for each in missing)
        return {PoolKey(group, sequence.format): count for group in self._groups} if count else {}

    def take(
        self, sequence: Sequence, missing: Seq[_Missing], fresh: dict[PoolKey, list[Block]]
    ) -> None:
        """Mutates `fresh`: takes the blocks that were `wanted`."""
        pools = {group: fresh.pop(PoolKey(group, sequence.format)) for group in self._groups}
        for each in missing:
            count = -(-each.media.keys // self._size)
            blocks = {group: [pool.pop() for _ in range(count)] for group, pool in pools.items()}
            entry = CrossEntry(self, each.key, blocks)
            sequence.blocks.cross[each.number] = self._entries[each.key] = entry

    def placed(self, sequence: Sequence, start: int, end: int) -> tuple[CrossKeys, ...]:
        """Mutates: what the tokens `[start, end)` attend to, as a snapshot.

        Who is first in a plan to need something computes it.
        """
        found = []
        for number, entry in sorted(sequence.blocks.cross.items()):
            media = sequence.cross_media[number]
            rows = media.within(start, end)
            if not rows:
                continue
            tables = {group: [each.id for each in own] for group, own in entry.blocks.items()}
            found.append(CrossKeys(rows, media, tables, not entry.written))
            if not entry.written:
                entry.written = True
                for block in entry.all:
                    self._manager.keep(block, entry)
        return tuple(found)

    def release_passed(self, sequence: Sequence) -> None:
        """Lets go of what no token that may still be computed attends to."""
        certain = sequence.progress.certain
        for number in list(sequence.blocks.cross):
            end = sequence.cross_media[number].end
            if end is not None and end <= certain:
                self._release(sequence.blocks.cross.pop(number))

    def release(self, sequence: Sequence) -> None:
        """Takes everything back."""
        for entry in sequence.blocks.cross.values():
            self._release(entry)
        sequence.blocks.cross.clear()

    def forget(self, entry: CrossEntry, evicted: Block) -> None:
        """One block of an entry is being evicted: its others are free."""
        self._entries.pop(entry.key, None)
        for block in entry.all:
            if block is not evicted:
                self._manager.drop(block)

    def clear(self) -> None:
        """No block is left."""
        self._entries.clear()

    def _release(self, entry: CrossEntry) -> None:
        entry.users -= 1
        if not entry.users and not entry.written:  # no step has been planned that computes it
            self._entries.pop(entry.key, None)
        self._manager.release_all(entry.all)
