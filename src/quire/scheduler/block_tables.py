"""Allocates and releases sequences' blocks, and reports their block tables. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import Block, PoolKey, blocks_by_pool
from quire.cache.reuse import Match
from quire.cache.specs import KVGroup, attention_groups, recurrent_groups
from quire.scheduler.cross_blocks import CrossBlocks
from quire.scheduler.plan import KVPlacement
from quire.scheduler.sequence import Sequence
from quire.scheduler.sequence_blocks import BlockTable


class BlockTables:
    """Owner of the sequences' block tables: nothing else writes them.

    Attributes:
        has_states: whether the model has recurrent layers.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, groups: tuple[KVGroup, ...], manager: BlockManager, block_size: int) -> None:
        self._groups = groups
        self._attention = attention_groups(groups)
        self._windows = {g: spec for g, spec in self._attention.items() if not spec.sees_all}
        self._recurrent = tuple(recurrent_groups(groups))
        self.has_states = bool(self._recurrent)
        self.cross = CrossBlocks(groups, manager, block_size)
        self._manager = manager
        self._size = block_size

    # -- blocks come ---------------------------------------------------------------------------

    def admit(self, sequence: Sequence, match: Match) -> bool:
        """Share the matched blocks and allocate blocks for the prompt.

        Return False, without changes, if there is no room.
        """
        format, held = sequence.format, sequence.blocks
        shared = [b for table in match.blocks.values() for b in table if b is not None]
        sources = [*match.partial.values(), *match.snapshots.values()]
        for block in (*shared, *sources):
            self._manager.retain(block)
        total = -(-len(sequence.progress.tokens) // self._size)
        missing = total - match.length // self._size
        wanted = blocks_by_pool(
            self._groups, format, lambda group: group.spec.blocks_at_start(missing)
        )
        fresh = self._allocate_all(wanted)
        if fresh is None:
            self._manager.release_all([*shared, *sources])
            return False
        own = [blocks for key, blocks in fresh.items() if not key.tail]
        for group, blocks in zip(self._groups, own, strict=True):
            source = match.partial.get(group.index) or match.snapshots.get(group.index)
            if source is not None:
                held.copies.append((source, blocks[0]))
            held.tables.append(BlockTable([*match.blocks.get(group.index, []), *blocks]))
        held.tails = {key.group: blocks[0] for key, blocks in fresh.items() if key.tail}
        held.state_at = match.length
        held.placement = None
        return True

    def extend(self, sequence: Sequence, end: int) -> bool:
        """Allocate blocks for the tokens up to `end`, and for media that they attend to.

        Return False if there is no room. Cached media blocks may then be held already; nothing else
        has changed.
        """
        count = (end - 1) // self._size + 1
        tables = sequence.blocks.tables
        wanted: dict[PoolKey, int] = {}
        for group in self._attention:
            missing = count - len(tables[group].blocks)
            if missing > 0:
                wanted[PoolKey(group, sequence.format)] = missing
        unseen = self.cross.hold(sequence, end) if sequence.cross_media else []
        if unseen:
            wanted |= self.cross.wanted(sequence, unseen)
        if not wanted:
            return True
        fresh = self._allocate_all(wanted)
        if fresh is None:
            return False
        if unseen:
            self.cross.take(sequence, unseen, fresh)
        for key, blocks in fresh.items():
            tables[key.group].blocks.extend(blocks)
        sequence.blocks.placement = None
        return True

    def extend_for_drafts(self, sequence: Sequence, end: int) -> bool:
        """Allocate blocks and spare slots for rows up to `end` that include drafts, if there is
        room.
        """
        if self._reserve_spares(sequence) and self.extend(sequence, end):
            return True
        self.drop_spares(sequence)
        return False

    def _reserve_spares(self, sequence: Sequence) -> bool:
        """Reserve a second slot for each recurrent state, so that the state before the drafts is
        kept.
        """
        held = sequence.blocks
        if not self._recurrent or held.spares:
            return True
        wanted = {PoolKey(group, sequence.format): 1 for group in self._recurrent}
        fresh = self._allocate_all(wanted)
        if fresh is None:
            return False
        held.spares = {key.group: blocks[0] for key, blocks in fresh.items()}
        return True

    def _allocate_all(self, wanted: dict[PoolKey, int]) -> dict[PoolKey, list[Block]] | None:
        if len(wanted) > 1 and not self._manager.can_allocate(wanted):
            return None
        fresh: dict[PoolKey, list[Block]] = {}
        for key, count in wanted.items():
            blocks = self._manager.allocate(key, count)
            if blocks is None:
                for taken in fresh.values():
                    self._manager.release_all(taken)
                return None
            fresh[key] = blocks
        return fresh

    # -- blocks go -----------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Release everything that a sequence holds."""
        held = sequence.blocks
        for table in held.tables:
            self._manager.release_all(table.blocks)
        self._manager.release_all(held.tails.values())
        self.drop_spares(sequence)
        self.drop_copies(sequence)
        self.cross.release(sequence)
        held.tables, held.tails, held.placement = [], {}, None

    def drop_copies(self, sequence: Sequence) -> bool:
        """Release the sources of planned copies; return whether there were any."""
        copies, sequence.blocks.copies = sequence.blocks.copies, []
        self._manager.release_all(source for source, _ in copies)
        return bool(copies)

    def release_passed(self, sequences: Iterable[Sequence]) -> None:
        """Release the blocks that no future token's window reaches."""
        for sequence in sequences:
            if sequence.blocks.cross:
                self.cross.release_passed(sequence)
            if self._windows:
                self._release_passed(sequence)

    def _release_passed(self, sequence: Sequence) -> None:
        length = sequence.progress.certain
        if self._recurrent:
            length = min(length, sequence.blocks.state_at)
        for group, spec in self._windows.items():
            table = sequence.blocks.tables[group].blocks
            first = spec.first_needed(length) // self._size
            number = min(first, len(table)) - 1
            while number >= 0 and (block := table[number]) is not None:
                self._manager.release(block)
                table[number] = None
                number -= 1

    def cuts_anywhere(self, sequence: Sequence) -> bool:
        """Return whether a sequence can be cut back to any token: what wrong drafts wrote is then
        overwritten.
        """
        return not (self._recurrent or sequence.format.has_tail)

    def max_drafts(self, sequence: Sequence) -> int:
        """Return how many drafts the next rows may include so that `settle` can undo them.

        Most of what a wrong draft wrote is overwritten later, with two exceptions. A full tail is
        quantised. A recurrent state is restored to the state before all the rows, so these must not
        complete a block that the index would register.
        """
        if self.cuts_anywhere(sequence):
            return sequence.max_context
        progress = sequence.progress
        end = (progress.computed // self._size + 1) * self._size
        if progress.known >= end:
            return 0
        return end - progress.known if sequence.format.has_tail else sequence.max_context

    def until_block_end(self, sequence: Sequence) -> int:
        """Return how many tokens are free in the block of the sequence's next row."""
        return self._size - sequence.progress.computed % self._size

    def to_block_end(self, sequence: Sequence, count: int) -> int:
        """Return how many of the next `count` rows lie before a block end; `count` if none is
        crossed.

        In formats with tails, rows that start a block do not read its tail.
        """
        beyond = (sequence.progress.computed + count) % self._size
        return count - beyond if sequence.format.has_tail and beyond < count else count

    def drop_spares(self, sequence: Sequence) -> bool:
        """Release the second slots; return whether there were any."""
        spares, sequence.blocks.spares = sequence.blocks.spares, {}
        self._manager.release_all(spares.values())
        return bool(spares)

    def advance(self, sequence: Sequence) -> None:
        """Record that the sequence's own state slots will include the rows just planned. Needed
        only if the model `has_states`.
        """
        if not sequence.progress.unsettled:
            sequence.blocks.state_at = sequence.progress.computed

    # -- cutting back --------------------------------------------------------------------------

    def settle(self, sequence: Sequence, accepted: int) -> int:
        """Keep the first `accepted` computed tokens, after the drafts among the last rows are
        known.

        Returns:
            How many computed tokens the sequence can continue from: `accepted`, or fewer if a
            recurrent state included a wrong draft and was restored to the one before the rows, or
            if the last of their blocks is shared or is kept as codes only.
        """
        if self.cuts_anywhere(sequence):
            for group in self._attention:
                self._shorten(sequence, group, -(-accepted // self._size))
            return accepted  # nobody else has seen what wrong drafts wrote
        held = sequence.blocks
        if self._recurrent and accepted == sequence.progress.computed:
            for group, spare in held.spares.items():
                held.spares[group], held.tables[group] = held.state(group), BlockTable([spare])
            held.state_at, held.placement = accepted, None
        length = held.state_at if self._recurrent else accepted
        number, within = divmod(length, self._size)
        if within and not self._may_write(sequence, number, within):
            length -= within
        assert not self._recurrent or length == held.state_at, "states are not cut back"
        keeps_tail = length % self._size and sequence.format.has_tail
        for group in self._attention:
            table = sequence.blocks.tables[group]
            first = -(-length // self._size)
            if keeps_tail and _is_shared(table.blocks[first - 1], length % self._size):
                first -= 1  # the tail has its tokens as written; their codes go to another block
            self._shorten(sequence, group, first)
        return length

    def _shorten(self, sequence: Sequence, group: int, blocks: int) -> None:
        """Release all but the first `blocks` blocks of a table."""
        table = sequence.blocks.tables[group]
        if len(table.blocks) > blocks:
            self._manager.release_all(table.blocks[blocks:])
            del table.blocks[blocks:]
            table.renew()
            sequence.blocks.placement = None

    def _may_write(self, sequence: Sequence, number: int, within: int) -> bool:
        """Return whether tokens from offset `within` of block `number` on may be overwritten."""
        if sequence.format.has_tail:
            return number == (sequence.progress.computed - 1) // self._size
        tables = (sequence.blocks.table(group) for group in self._attention)
        return not any(_is_shared(table[number], within) for table in tables)

    # -- snapshots -----------------------------------------------------------------------------

    def place(self, sequence: Sequence) -> KVPlacement:
        """Return the block ids of a sequence. Valid for one step only: blocks move when pools
        shrink."""
        held = sequence.blocks
        if held.epoch != self._manager.capacity.epoch:
            for table in held.tables:
                table.renew()
            held.epoch, held.placement = self._manager.capacity.epoch, None
        if held.placement is None:
            held.placement = KVPlacement(
                tuple(table.ids() for table in held.tables),
                {group: block.id for group, block in held.tails.items()},
            )
        return held.placement


def _is_shared(block: Block | None, within: int) -> bool:
    """Return whether others rely on a block's tokens from offset `within` on."""
    if block is None:
        return False
    return block.refs > 1 or (block.holder is not None and block.holder.tokens_in(block) > within)
