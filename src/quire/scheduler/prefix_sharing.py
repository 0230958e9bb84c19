"""What sequences share: who finds which blocks, who waits for whom, what is kept for later.

The scheduler asks here before it admits a sequence, and tells what was computed after each plan.
"""

from __future__ import annotations

from itertools import takewhile

from quire.cache.block_manager import Block, BlockManager, PoolKey
from quire.cache.disk_prefetch import DiskPrefetch, Prompt
from quire.cache.index import Match, Node, PrefixIndex, chain, common_length
from quire.cache.specs import KVGroup, attention_groups, recurrent_groups
from quire.scheduler.sequence import Sequence


class PrefixSharing:
    """The prefix index as sequences use it. Owns the index, and what each sequence has in it.

    Args:
        page_tokens: tokens a block.
        snapshot_every: tokens between two recurrent snapshots of a prompt.
        enabled: whether anything is shared at all.
    """

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        manager: BlockManager,
        page_tokens: int,
        snapshot_every: int,
        enabled: bool,
    ) -> None:
        self.index = PrefixIndex(groups, manager, page_tokens)
        self.prefetch: DiskPrefetch | None = None
        """Reads blocks back, if there is a disk tier."""
        self._attention = tuple(attention_groups(groups))
        self._recurrent = tuple(recurrent_groups(groups))
        self._manager = manager
        self._size = page_tokens
        self._every = snapshot_every
        self._enabled = enabled
        self._computing: dict[bytes, Sequence] = {}
        """Keys of blocks that running sequences are about to compute, and who will."""

    # -- before a sequence runs ----------------------------------------------------------------

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether what a sequence waits for has still not come; costs next to nothing."""
        return sequence.waits_on in self._computing or self._reads_disk(sequence)

    def match(self, sequence: Sequence) -> Match | None:
        """What the index has for a sequence that need not wait; None if it had better wait:

        for a neighbour that is computing what it needs, or for the disk.
        """
        if not self._enabled or sequence.afresh:
            return Match(reason="evicted" if self._enabled else "off")
        sequence.waits_on = None
        size = self._size
        limit = len(sequence.tokens) - 1
        keys = sequence.keys(limit // size, size)
        match = self.index.match(
            sequence.identity,
            sequence.content,
            keys,
            limit=limit,
            partial=not sequence.format.has_tail,
        )
        following = match.reached // size
        coming = list(takewhile(self._computing.__contains__, keys[following:]))
        if coming:
            sequence.waits_on = coming[-1]
            return None
        if self._recurrent and self._state_is_coming(sequence, match, keys[:following]):
            return None
        if self.prefetch is not None:
            prompt = Prompt(sequence.identity, sequence.format, sequence.content, keys)
            reading = self.prefetch.begin(prompt, match.length, sequence.reading)
            sequence.reading = reading or sequence.reading
            if sequence.reading and match.reason and match.length == sequence.reading.end * size:
                match.reason = "evicted"  # the disk keeps whole blocks only
        return None if sequence.waits_for_disk else match

    def _state_is_coming(self, sequence: Sequence, match: Match, keys: list[bytes]) -> bool:
        """Whether a neighbour will keep its recurrent state where the prompts still agree."""
        neighbour = self._computing.get(keys[-1]) if keys else None
        if neighbour is None:
            return False
        agree = min(len(sequence.tokens) - 1, common_length(sequence.content, neighbour.content))
        ahead = max(match.length, neighbour.computed - 1)
        return any(ahead < p <= agree for p in self._snapshot_positions(neighbour))

    def _reads_disk(self, sequence: Sequence) -> bool:
        """Whether a part of its beginning is still being read; what has come is in the index."""
        if self.prefetch is None or sequence.reading is None:
            return False
        return not self.prefetch.settle(sequence.reading)

    def begin(self, sequence: Sequence, match: Match) -> None:
        """A sequence runs: it goes on from what it matched, and promises the rest of its prompt."""
        size = self._size
        sequence.computed = match.length
        sequence.registered = match.length // size
        sequence.trail = self.index.root(sequence.identity)
        for key in sequence.keys(sequence.registered, size):
            child = self.index.child(sequence.trail, key)
            assert child is not None, "a matched block has no node"
            sequence.trail = child
        sequence.promised = sequence.keys(len(sequence.tokens) // size, size)[sequence.registered :]
        for key in sequence.promised:
            self._computing.setdefault(key, sequence)

    # -- while it runs -------------------------------------------------------------------------

    def register(self, sequence: Sequence) -> None:
        """Tells the index of blocks that are full and whose tokens the host has read."""
        size = self._size
        full = sequence.confirmed // size
        if full == sequence.registered:
            return
        keys = sequence.keys(full, size)
        while sequence.registered < full:
            number = sequence.registered
            key = keys[number]
            if not self._recurrent and self._computing.get(key) is sequence:
                del self._computing[key]
            if self._enabled and sequence.trail is not None:
                tokens = tuple(sequence.content[number * size : (number + 1) * size])
                blocks = self._blocks_at(sequence, number)
                sequence.trail = self.index.insert(sequence.trail, key, tokens, blocks)
            sequence.registered += 1

    def prompt_done(self, sequence: Sequence) -> None:
        """Nobody need wait for this sequence's prompt any more."""
        for key in sequence.promised:
            if self._computing.get(key) is sequence:
                del self._computing[key]
        sequence.promised = []

    def _blocks_at(self, sequence: Sequence, number: int) -> dict[int, Block]:
        blocks = {}
        for group in self._attention:
            table = sequence.tables[group]
            block = table[number] if number < len(table) else None
            if block is not None:
                blocks[group] = block
        return blocks

    # -- recurrent state -----------------------------------------------------------------------

    def until_snapshot(self, sequence: Sequence) -> int:
        """Tokens up to the next position whose recurrent state is to be kept, or to the end."""
        rest = len(sequence.tokens) - sequence.computed
        if not self._recurrent or not self._enabled:
            return rest
        ahead = [p - sequence.computed for p in self._snapshot_positions(sequence)]
        return min([rest, *(a for a in ahead if a > 0)])

    def _snapshot_positions(self, sequence: Sequence) -> set[int]:
        """Message ends, the prompt's last token but one, and every so often between.

        Formats that seal are shared by whole blocks, so there the positions are block boundaries.
        """
        size, every = self._size, self._every
        length = sequence.prompt_length
        wanted = {*sequence.request.snapshots, *range(every, length, every), length - 1}
        if self.prefetch is not None:
            wanted.add((length - 1) // size * size)  # the disk holds states at block ends only
        if sequence.format.has_tail:
            wanted = {position // size * size for position in wanted}
        return {position for position in wanted if 0 < position < length}

    def save_states(self, sequence: Sequence) -> list[tuple[Block, Block]]:
        """(state, slot to copy it to) where another prompt is likely to part from this one.

        The slots are the index's from now on; the caller releases them once the step is launched.
        """
        saves: list[tuple[Block, Block]] = []
        if not self._recurrent or not self._enabled or sequence.pending:
            return saves
        if sequence.computed not in self._snapshot_positions(sequence):
            return saves
        node = self._tail_node(sequence)
        offset = (sequence.computed - 1) % self._size + 1
        for group in self._recurrent:
            state = sequence.tables[group][0]
            if node is None or state is None:
                continue
            slots = self._manager.allocate(PoolKey(group, sequence.format), 1)
            if slots is None:
                break
            if self.index.insert_snapshot(node, offset, slots[0]):
                saves.append((state, slots[0]))
            else:
                self._manager.release(slots[0])
        return saves

    def _tail_node(self, sequence: Sequence) -> Node | None:
        """The index node that ends where the sequence's computed tokens end."""
        size = self._size
        number, rest = divmod(sequence.confirmed, size)
        if sequence.trail is None or sequence.registered != number or rest == 0:
            return sequence.trail if sequence.registered == number else None
        tokens = tuple(sequence.content[number * size : sequence.confirmed])
        blocks = self._blocks_at(sequence, number)
        return self.index.insert(sequence.trail, chain(sequence.trail.key, tokens), tokens, blocks)

    # -- when it goes --------------------------------------------------------------------------

    def register_tail(self, sequence: Sequence) -> None:
        """Registers what lies beyond the last full block, and the recurrent state itself."""
        partial = sequence.confirmed % self._size
        if not self._enabled or (partial and sequence.format.has_tail):
            return
        node = self._tail_node(sequence)
        if node is None or node.parent is None or sequence.computed > len(sequence.tokens):
            return
        offset = (sequence.computed - 1) % self._size + 1
        for group in self._recurrent:
            state = sequence.tables[group][0]
            assert state is not None, "a state slot is never given back early"
            self.index.insert_snapshot(node, offset, state)
