"""Prefix sharing between sequences: lookup, waiting for a neighbour, registration, snapshots.

The scheduler calls it before it admits a sequence, and reports after each plan what was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import Block, PoolKey
from quire.cache.disk_prefetch import DiskPrefetch, WantedPrefix
from quire.cache.index import Node, PrefixIndex
from quire.cache.reuse import Match, MissKind, ReuseMiss, common_length
from quire.cache.specs import KVGroup, attention_groups, recurrent_groups
from quire.core.block_keys import chain
from quire.scheduler.sequence import PrefixCursor, Sequence

_NOT_FOUND = (MissKind.NEW, MissKind.DIFFERENCE, MissKind.END)


ReadAhead = Callable[[PrefixIndex], DiskPrefetch]
"""Makes the reader of an index's blocks from the disk tier."""


class PrefixSharing:
    """Prefix reuse among sequences. Owns the prefix index and each sequence's cursor.

    Args:
        block_size: tokens per block.
        snapshot_every: tokens between two recurrent snapshots of a prompt.
        enabled: whether prefixes are shared at all.
        read_ahead: makes the reader of the index's blocks from the disk tier; None without a disk
            tier.
    """

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        manager: BlockManager,
        block_size: int,
        snapshot_every: int,
        enabled: bool,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self.index = PrefixIndex(groups, manager, block_size)
        self._prefetch = None if read_ahead is None else read_ahead(self.index)
        self._attention = tuple(attention_groups(groups))
        self._recurrent = tuple(recurrent_groups(groups))
        self._manager = manager
        self._size = block_size
        self._every = snapshot_every
        self._enabled = enabled
        self.saves_states = enabled and bool(self._recurrent)
        """Whether `save_states` may return any."""
        self._computing: dict[bytes, Sequence] = {}
        """The running sequence that will compute each block, by key."""

    # -- before a sequence runs ----------------------------------------------------------------

    def must_wait(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence's prefix is still being computed or read. Cheap to
        call.
        """
        return sequence.prefix.waits_on in self._computing or self._reads_disk(sequence)

    def match(self, sequence: Sequence) -> Match | None:
        """Return the cached start of a sequence; None if it should wait instead.

        It waits while a neighbour computes blocks that it needs, or while they are read from disk.
        """
        progress, cursor = sequence.progress, sequence.prefix
        if not self._enabled or cursor.ignored:
            disabled = None if self._enabled else ReuseMiss(MissKind.DISABLED)
            return Match(miss=disabled or cursor.ignored)
        cursor.waits_on = None
        size = self._size
        limit = len(progress.tokens) - 1
        keys = cursor.keys(progress.content, limit // size, size)
        match = self.index.match(
            cursor.identity,
            progress.content,
            keys,
            limit=limit,
            partial=not sequence.format.has_tail,
        )
        following = match.reached // size
        coming = list(
            takewhile(
                lambda key: _comes_before(self._computing.get(key), sequence), keys[following:]
            )
        )
        if coming:
            cursor.waits_on = coming[-1]
            self._request_snapshot(self._computing[coming[-1]], sequence)
            return None
        if self._recurrent and self._state_is_coming(sequence, match, keys[:following]):
            return None
        if self._prefetch is not None:
            prompt = WantedPrefix(
                cursor.identity, sequence.format, tokens=progress.content, keys=keys
            )
            reading = self._prefetch.start(prompt, match.length, cursor.reading)
            cursor.reading = reading or cursor.reading
            end = cursor.reading.end * size if cursor.reading else -1
            if match.miss is not None and match.length == end:
                match.miss = ReuseMiss(MissKind.EVICTED)  # the disk keeps whole blocks only
        return None if cursor.waits_for_disk else match

    def _state_is_coming(self, sequence: Sequence, match: Match, keys: list[bytes]) -> bool:
        """Return whether a neighbour will save its recurrent state where the prompts diverge."""
        neighbour = self._computing.get(keys[-1]) if keys else None
        if neighbour is None:
            return False
        agree = _agreement(sequence, neighbour)
        ahead = max(match.length, neighbour.progress.computed - 1)
        return any(ahead < p <= agree for p in self._snapshot_positions(neighbour))

    def _request_snapshot(self, neighbour: Sequence, sequence: Sequence) -> None:
        """Ask a neighbour to leave a snapshot where a waiting prompt diverges from its own."""
        computed = neighbour.progress.computed
        if not self._recurrent or neighbour.prefix.parting > computed:
            return
        parting = _agreement(sequence, neighbour)
        if parting > computed:
            neighbour.prefix.parting = parting

    def _reads_disk(self, sequence: Sequence) -> bool:
        """Return whether a part of the prompt is still being read from disk. Index finished
        parts.
        """
        if self._prefetch is None or sequence.prefix.reading is None:
            return False
        return not self._prefetch.settle(sequence.prefix.reading)

    def ignore(self, sequence: Sequence, kind: MissKind) -> None:
        """Exclude a sequence from reuse, for a reason that its output names."""
        sequence.prefix.ignored = ReuseMiss(kind)

    def start(self, sequence: Sequence, match: Match, running: Iterable[Sequence]) -> bool:
        """Start a sequence after its match; record the blocks that it will compute.

        Args:
            running: the other running sequences.

        Returns:
            Whether the sequence runs for the first time.
        """
        progress, cursor = sequence.progress, sequence.prefix
        size = self._size
        cursor.registered = match.length // size
        node = self.index.root(cursor.identity)
        for key in cursor.keys(progress.content, cursor.registered, size):
            child = self.index.child(node, key)
            assert child is not None, "a matched block has no node"
            node = child
        self._move(cursor, node)
        keys = cursor.keys(progress.content, len(progress.tokens) // size, size)
        cursor.computing = keys[cursor.registered :]
        for key in cursor.computing:
            self._computing.setdefault(key, sequence)
        cursor.reading = None
        miss, parting = self._beside_neighbours(sequence, match, running)
        worth = bool(self._recurrent) and parting - match.length >= self.index.min_saving
        cursor.parting = parting if worth else 0
        first = not cursor.started
        if first:
            cursor.begin(match.length, miss)
        return first

    def _beside_neighbours(
        self, sequence: Sequence, match: Match, running: Iterable[Sequence]
    ) -> tuple[ReuseMiss | None, int]:
        """Correct a match's miss reason by the last blocks of running neighbours.

        These blocks are indexed only when full, or when the neighbour ends.

        Returns:
            Why no more is reused, and the longest agreement with any prompt.
        """
        miss, parting = match.miss, match.reached
        if miss is None or miss.kind not in _NOT_FOUND:
            return miss, parting
        content = sequence.progress.content
        # Most neighbours part here: counting what agrees would take longer.
        head = content[: parting + 1]
        further = [each for each in running if each.progress.content[: parting + 1] == head]
        agreed = max([_agreement(sequence, each) for each in further], default=0)
        if agreed > parting:
            return ReuseMiss(MissKind.BEING_WRITTEN, match.length), agreed
        if miss.kind is MissKind.END and miss.token == parting:
            head = content[:parting]
            others = [each for each in running if each.progress.content[:parting] == head]
            for each in others:
                if _agreement(sequence, each) == parting < len(each.progress.content):
                    return ReuseMiss(MissKind.DIFFERENCE, parting), parting
        return miss, parting

    # -- while it runs -------------------------------------------------------------------------

    def register(self, sequences: Iterable[Sequence]) -> None:
        """Register full blocks whose tokens the host has read."""
        size = self._size
        for sequence in sequences:
            # In most steps no block is filled.
            if sequence.progress.computed >= (sequence.prefix.registered + 1) * size:
                self._register_blocks(sequence)

    def _register_blocks(self, sequence: Sequence) -> None:
        progress, cursor, size = sequence.progress, sequence.prefix, self._size
        full = progress.confirmed // size
        if full == cursor.registered:
            return
        keys = cursor.keys(progress.content, full, size)
        while cursor.registered < full:
            number = cursor.registered
            key = keys[number]
            if not self._recurrent and self._computing.get(key) is sequence:
                del self._computing[key]
            if self._enabled and cursor.node is not None:
                tokens = tuple(progress.content[number * size : (number + 1) * size])
                blocks = self._blocks_at(sequence, number)
                self._move(cursor, self.index.insert(cursor.node, key, tokens, blocks=blocks))
            cursor.registered += 1

    def _move(self, cursor: PrefixCursor, node: Node | None) -> None:
        """Move a sequence's cursor to another node of the index."""
        left, cursor.node = cursor.node, node
        self.index.move(left, node)

    def prompt_done(self, sequence: Sequence) -> None:
        """Record that no other sequence has to wait for this prompt."""
        cursor = sequence.prefix
        if not cursor.computing:
            return
        for key in cursor.computing:
            if self._computing.get(key) is sequence:
                del self._computing[key]
        cursor.computing = []

    def _blocks_at(self, sequence: Sequence, number: int) -> dict[int, Block]:
        blocks = {}
        for group in self._attention:
            table = sequence.blocks.table(group)
            block = table[number] if number < len(table) else None
            if block is not None:
                blocks[group] = block
        return blocks

    # -- recurrent state -----------------------------------------------------------------------

    def until_snapshot(self, sequence: Sequence) -> int:
        """Return the tokens up to the next snapshot position, or to the prompt's end."""
        progress = sequence.progress
        rest = len(progress.tokens) - progress.computed
        if not self._recurrent or not self._enabled:
            return rest
        ahead = [p - progress.computed for p in self._snapshot_positions(sequence)]
        return min([rest, *(a for a in ahead if a > 0)])

    def _snapshot_positions(self, sequence: Sequence) -> set[int]:
        """Return snapshot positions: message ends, near the prompt's end, intervals, divergences.

        Formats with a tail are shared by whole blocks: there the positions are block boundaries.
        """
        size, every = self._size, self._every
        length = sequence.progress.prompt_length
        ends = {length - 1, sequence.prefix.parting}
        wanted = {*sequence.request.snapshots, *range(every, length, every), *ends}
        if self._prefetch is not None:  # the disk holds states at block ends only
            wanted.update(end // size * size for end in ends)
        if sequence.format.has_tail:
            wanted = {position // size * size for position in wanted}
        return {position for position in wanted if 0 < position < length}

    def save_states(self, sequence: Sequence) -> list[Block]:
        """Return slots for snapshots of the state, at positions where another prompt may diverge.

        The index owns them from now on. The caller releases them once the plan is made.
        """
        progress = sequence.progress
        saves: list[Block] = []
        if progress.pending:
            return saves
        if progress.computed not in self._snapshot_positions(sequence):
            return saves
        slots: list[Block] = []
        for group in self._recurrent:
            slots += self._manager.allocate(PoolKey(group, sequence.format), 1) or ()
        # Only then the node: what made room for the slots may have been on its path.
        node = self._tail_node(sequence) if len(slots) == len(self._recurrent) else None
        offset = (progress.computed - 1) % self._size + 1
        for slot in slots:
            if node is not None and self.index.insert_snapshot(node, offset, slot):
                saves.append(slot)
            else:
                self._manager.release(slot)
        return saves

    def _tail_node(self, sequence: Sequence) -> Node | None:
        """Return the index node that ends where the sequence's computed tokens end."""
        progress, cursor = sequence.progress, sequence.prefix
        size = self._size
        number, rest = divmod(progress.confirmed, size)
        if cursor.node is None or cursor.registered != number or rest == 0:
            return cursor.node if cursor.registered == number else None
        tokens = tuple(progress.content[number * size : progress.confirmed])
        blocks = self._blocks_at(sequence, number)
        key = chain(cursor.node.key, tokens)
        return self.index.insert(cursor.node, key, tokens, blocks=blocks)

    def end(self, sequence: Sequence) -> None:
        """Register the blocks of a sequence that is about to release them, for later reuse."""
        self.prompt_done(sequence)
        self._register_tail(sequence)
        self._move(sequence.prefix, node=None)
        sequence.prefix.registered = 0

    # -- when it goes --------------------------------------------------------------------------

    def _register_tail(self, sequence: Sequence) -> None:
        """Register the partly filled block after the last full one, and the recurrent state."""
        progress = sequence.progress
        partial = progress.confirmed % self._size
        if not self._enabled or (partial and sequence.format.has_tail):
            return
        if self._recurrent and progress.computed > len(progress.tokens):
            return  # the state is past what is known
        node = self._tail_node(sequence)
        if node is None or node.parent is None:
            return
        offset = (progress.computed - 1) % self._size + 1
        for group in self._recurrent:
            self.index.insert_snapshot(node, offset, sequence.blocks.state(group))


def _agreement(sequence: Sequence, other: Sequence) -> int:
    """Return how many leading tokens of a prompt, without its last, start another sequence
    as well.
    """
    if other.prefix.identity != sequence.prefix.identity:
        return 0
    agreed = common_length(sequence.progress.content, other.progress.content)
    return min(agreed, len(sequence.progress.tokens) - 1)


def _comes_before(owner: Sequence | None, sequence: Sequence) -> bool:
    """Return whether a block is being computed by a sequence whose turn is not later than this
    one's.
    """
    return owner is not None and owner.level <= sequence.level
