"""The prefix index: a tree of computed blocks, found by their tokens.

A node stands for the tokens of one block, or of a last, partly filled one, after its parent's. It
holds at most one block for every KV group, and snapshots of recurrent state at positions within.
Blocks of full attention anchor a node: it is removed with them. Blocks of a window and snapshots
may be missing; a match then ends where everything that a sequence needs is present.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import takewhile

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import Block
from quire.cache.reuse import Match, MissKind, ReuseMiss, common_length
from quire.cache.specs import KVGroup, attention_groups, recurrent_groups
from quire.core.block_keys import lasting_name

_SIBLINGS = 8
"""Children examined on either side of a prompt's tail in the order of tokens."""
_MIN_SAVING = 16
"""Fewest tokens that a recurrent snapshot must save to be kept; fewer if blocks are smaller."""
_EVICTED = ReuseMiss(MissKind.EVICTED)
_NO_SNAPSHOT = ReuseMiss(MissKind.NO_SNAPSHOT)


class Node:
    """The tokens of one block, and its cached blocks and snapshots. Implements
    `block_manager.Holder`.
    """

    __slots__ = (
        "blocks",
        "children",
        "cursors",
        "index",
        "key",
        "ordered",
        "parent",
        "snapshots",
        "tokens",
    )

    def __init__(
        self, index: PrefixIndex, parent: Node | None, key: bytes, tokens: tuple[int, ...]
    ) -> None:
        self.index = index
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.children: dict[bytes, Node] = {}
        self.ordered: list[tuple[tuple[int, ...], bytes]] = []
        """Children sorted by their tokens, so that the best partial match is a neighbour."""
        self.blocks: dict[int, Block] = {}
        self.snapshots: dict[tuple[int, int], Block] = {}
        """Recurrent snapshots: (group, tokens into this block) -> state slot."""
        self.cursors = 0
        """Number of sequences whose cursor is here. The node stays while there are any, even
        without a block.
        """

    def name(self, block: Block) -> bytes | None:
        if len(self.tokens) != self.index.block_size:
            return None
        group = block.pool.group
        at_end = self.snapshots.get((group, self.index.block_size))
        whole = self.blocks.get(group) is block or at_end is block
        return lasting_name(self.key, group) if whole else None

    def tokens_in(self, block: Block) -> int:
        group = block.pool.group
        if self.blocks.get(group) is block:
            return len(self.tokens)
        return self.index.block_size  # a state: no part of it may change

    def lost_with(self, block: Block) -> Iterator[Block]:
        group = block.pool.group
        if group not in self.index.anchors or self.blocks.get(group) is not block:
            yield block
            return
        pending = [self]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            yield from node.blocks.values()
            yield from node.snapshots.values()

    def forget(self, block: Block) -> None:
        group = block.pool.group
        if self.blocks.get(group) is block:
            del self.blocks[group]
            if group in self.index.anchors:
                self.index.remove(self)
                return
        else:
            for place, snapshot in list(self.snapshots.items()):
                if snapshot is block:
                    del self.snapshots[place]
        self.index.prune(self)

    def alike(self, tokens: tuple[int, ...]) -> Iterator[tuple[Node, int]]:
        """Yield children that start as `tokens` does, and how many tokens agree, most first."""
        ordered, at = self.ordered, bisect_left(self.ordered, (tokens, b""))
        nearby = range(max(0, at - _SIBLINGS), min(len(ordered), at + _SIBLINGS))

        def agreeing(place: int) -> int:
            return common_length(ordered[place][0], tokens) if place in nearby else 0

        places = [at, at - 1]  # the next on either side
        common = [agreeing(place) for place in places]
        while any(common):
            side = int(common[1] > common[0])
            yield self.children[ordered[places[side]][1]], common[side]
            places[side] += 1 - 2 * side
            common[side] = agreeing(places[side])


class PrefixIndex:
    """Finds the longest computed start of a prompt.

    Args:
        groups: the model's KV groups.
        manager: owns the blocks and decides when to evict one.
        block_size: tokens per block.
    """

    def __init__(self, groups: tuple[KVGroup, ...], manager: BlockManager, block_size: int) -> None:
        self.groups = groups
        self.anchors = frozenset(g.index for g in groups if g.spec.sees_all)
        self.block_size = block_size
        self.min_saving = min(_MIN_SAVING, block_size)
        self._manager = manager
        self._recurrent = tuple(recurrent_groups(groups))
        self._attention = attention_groups(groups)
        self._roots: dict[bytes, Node] = {}

    # -- lookup --------------------------------------------------------------------------------

    def match(
        self, identity: bytes, tokens: Seq[int], keys: Seq[bytes], *, limit: int, partial: bool
    ) -> Match:
        """Return the longest reusable start of `tokens`.

        Args:
            identity: root of the chain, from model, format and salt.
            keys: the chained hashes of the full blocks of `tokens`.
            limit: the most tokens to reuse: one less than the prompt has, because one must be
                computed.
            partial: whether blocks may be copied up to a token within (plain formats).
        """
        root = self._roots.get(identity)
        if root is None:
            return Match()
        path = _descend(root, keys)
        at = len(path) * self.block_size
        tail = tuple(tokens[at : min(at + self.block_size, limit)])
        parent = path[-1] if path else root
        last, usable, agreed = self._best_tail(parent, tail)
        reached = at + agreed if partial else at
        if reached == 0:
            return Match()
        found_all = at + agreed == limit
        end = None
        if not found_all:
            nearest = last if usable == agreed else None
            end = ReuseMiss(_why_it_ends(parent, tail, agreed, nearest=nearest), at + agreed)
        length, miss = reached, end
        if partial and usable < agreed:
            length, miss = at + usable, _NO_SNAPSHOT if self._recurrent else _EVICTED
        length, miss = self._longest(path, last, length=length, miss=miss, partial=partial)
        if miss is _NO_SNAPSHOT and reached - length < self.min_saving:
            miss = end
        match = self._collect(path, last, length, miss=miss)
        match.reached = reached
        return match

    def _best_tail(self, parent: Node, tokens: tuple[int, ...]) -> tuple[Node | None, int, int]:
        """Find the child of `parent` with the longest common prefix. Return the child to copy from,
        the tokens to copy, and the longest match of any child.

        Several children may hold the same tokens, computed by several sequences.
        """
        best, usable, agreed = None, 0, 0
        for child, common in parent.alike(tokens):
            agreed = max(agreed, common)
            if common <= usable:
                break
            length = common if self._attention.keys() <= child.blocks.keys() else 0
            if self._recurrent:
                length = max((at for at in self._states_in(child) if at <= length), default=0)
            if length > usable:
                best, usable = child, length
        return best, usable, agreed

    def _states_in(self, node: Node) -> list[int]:
        """Return tokens into a node at which every recurrent group has a snapshot, last first."""
        offsets = sorted({offset for _, offset in node.snapshots}, reverse=True)
        return [
            offset
            for offset in offsets
            if all((group, offset) in node.snapshots for group in self._recurrent)
        ]

    def _longest(
        self,
        path: list[Node],
        last: Node | None,
        length: int,
        miss: ReuseMiss | None,
        *,
        partial: bool,
    ) -> tuple[int, ReuseMiss | None]:
        """Return the longest reusable prefix up to `length`, and the reason why it is not longer.

        Args:
            miss: why not more than `length` is reusable.
        """
        while length > 0:
            if self._recurrent:
                place = self._snapshot_at_most(path, last, length=length, partial=partial)
                if place < length:
                    length, miss = place, _NO_SNAPSHOT
                    continue
            missing = self._last_missing(path, last, length)
            if missing is None:
                return length, miss
            length, miss = missing * self.block_size, _EVICTED
        return 0, miss

    def _last_missing(self, path: list[Node], last: Node | None, length: int) -> int | None:
        """Return the highest block number that some group needs for `length` and does not have."""
        size = self.block_size
        end = -(-length // size)
        worst = None
        for group, spec in self._attention.items():
            start = spec.first_needed(length) // size
            for number in range(end - 1, start - 1, -1):
                node = path[number] if number < len(path) else last
                if node is None or group not in node.blocks:
                    worst = number if worst is None else max(worst, number)
                    break
                if group in self.anchors:
                    break  # anchors are there for every node of the path
        return worst

    def _snapshot_at_most(
        self, path: list[Node], last: Node | None, length: int, partial: bool
    ) -> int:
        """Return the last position up to `length` at which every recurrent group has a snapshot.

        Without `partial` only block ends count.
        """
        nodes = [*path, last] if last is not None else path
        for number in range(min(len(nodes) - 1, (length - 1) // self.block_size), -1, -1):
            base = number * self.block_size
            node = nodes[number]
            for offset in self._states_in(node) if node.snapshots else ():
                if base + offset <= length and (partial or offset == self.block_size):
                    return base + offset
        return 0

    def _collect(
        self, path: list[Node], last: Node | None, length: int, miss: ReuseMiss | None
    ) -> Match:
        size = self.block_size
        match = Match(length, miss=miss)
        if length == 0:
            return match
        full, rest = divmod(length, size)
        parting = (path[full] if full < len(path) else last) if rest else None
        for group, spec in self._attention.items():
            start = spec.first_needed(length) // size
            table: list[Block | None] = [None] * min(start, full)
            table += [path[number].blocks[group] for number in range(start, full)]
            match.blocks[group] = table
            if parting is not None:
                match.partial[group] = parting.blocks[group]
        holder = parting if parting is not None else path[full - 1]
        for recurrent in self._recurrent:
            match.snapshots[recurrent] = holder.snapshots[recurrent, rest or size]
        self._touch(path[: full + 1], parting)
        return match

    def _touch(self, path: list[Node], parting: Node | None) -> None:
        """Mark a path as used, deepest node first: leaves are evicted before their parents."""
        for node in [*([parting] if parting is not None else []), *reversed(path)]:
            for block in (*node.blocks.values(), *node.snapshots.values()):
                self._manager.touch(block)

    def path(self, identity: bytes, keys: Seq[bytes]) -> list[Node]:
        """Return the nodes of a prompt's first blocks, as many as exist."""
        root = self._roots.get(identity)
        return _descend(root, keys) if root is not None else []

    # -- insertion -----------------------------------------------------------------------------

    def root(self, identity: bytes) -> Node:
        """Return the root node of an identity's chain. It joins the index with its first child."""
        return self._roots.get(identity) or Node(self, parent=None, key=identity, tokens=())

    def child(self, parent: Node, key: bytes) -> Node | None:
        """Return the node of the next block, if it exists."""
        return parent.children.get(key)

    def insert(
        self, parent: Node, key: bytes, tokens: tuple[int, ...], blocks: dict[int, Block]
    ) -> Node | None:
        """Register the block computed after `parent`.

        Args:
            key: `chain(parent.key, tokens)`.
            tokens: the block's own tokens, `block_size` of them or fewer.
            blocks: blocks by group, without groups whose block is gone already.

        Returns:
            The node, or None when it cannot be kept: `parent` was evicted, or an anchor is missing.
        """
        if parent.parent is None:
            if parent.tokens:
                return None
            parent = self._roots.get(parent.key, parent)
        node = parent.children.get(key)
        if node is None:
            if not all(group in blocks for group in self.anchors):
                return None
            node = self._grow(parent, tokens, blocks) or Node(self, parent, key=key, tokens=tokens)
            node.key, node.tokens = key, tokens
            if parent.parent is None:
                self._roots[parent.key] = parent
            parent.children[key] = node
            insort(parent.ordered, (tokens, key))
        for group, block in blocks.items():
            if group not in node.blocks and block.holder is None:
                node.blocks[group] = block
                self._manager.keep(block, node)
        return node

    def _grow(self, parent: Node, tokens: tuple[int, ...], blocks: dict[int, Block]) -> Node | None:
        """Remove the partly filled node of the same blocks, so that it can be inserted with more
        tokens.
        """
        for block in blocks.values():
            node = block.holder
            if isinstance(node, Node) and node.parent is parent:
                if tokens[: len(node.tokens)] != node.tokens:
                    return None
                self._unlink(node)
                node.parent = parent
                return node
        return None

    def insert_snapshot(self, node: Node, offset: int, block: Block) -> bool:
        """Store a recurrent state after `offset` tokens of a node. Return False if it has one."""
        place = (block.pool.group, offset)
        if node.parent is None or place in node.snapshots:
            return False
        node.snapshots[place] = block
        self._manager.keep(block, node)
        return True

    # -- removal -------------------------------------------------------------------------------

    def move(self, left: Node | None, reached: Node | None) -> None:
        """Move a sequence's cursor from node `left` to `reached`; None means no node."""
        if reached is not None:
            reached.cursors += 1
        if left is not None:
            left.cursors -= 1
            self.prune(left)

    def prune(self, node: Node) -> None:
        """Remove nodes without block, snapshot, child or cursor, upwards from this one."""
        while node.parent is not None and not (
            node.children or node.blocks or node.snapshots or node.cursors
        ):
            parent = node.parent
            self._unlink(node)
            node = parent
        if node.parent is None and not node.children and self._roots.get(node.key) is node:
            del self._roots[node.key]

    def remove(self, node: Node) -> None:
        """Remove a node that lost its blocks, and everything below it."""
        parent = node.parent
        self._unlink(node)
        pending = [node]
        while pending:
            gone = pending.pop()
            pending.extend(gone.children.values())
            for block in (*gone.blocks.values(), *gone.snapshots.values()):
                self._manager.drop(block)
            gone.blocks.clear()
            gone.snapshots.clear()
            gone.children.clear()
            gone.parent = None  # a sequence whose cursor is here sees that it is lost
        if parent is not None:
            self.prune(parent)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        if parent is not None and parent.children.pop(node.key, None) is not None:
            del parent.ordered[bisect_left(parent.ordered, (node.tokens, node.key))]
            node.parent = None

    def clear(self) -> None:
        """Forget everything that is cached."""
        for root in list(self._roots.values()):
            for child in list(root.children.values()):
                self.remove(child)
        self._roots.clear()


def full_keys(index: PrefixIndex) -> Iterator[bytes]:
    """Yield the keys of all full blocks; those of a sequence in its order."""
    pending = [child for root in index._roots.values() for child in root.children.values()]
    while pending:
        node = pending.pop()
        if len(node.tokens) == index.block_size:
            yield node.key
            pending.extend(node.children.values())


def _descend(node: Node, keys: Seq[bytes]) -> list[Node]:
    """Return the nodes below `node` along `keys`, as many as exist."""
    path: list[Node] = []
    for key in keys:
        child = node.children.get(key)
        if child is None:
            break
        path.append(child)
        node = child
    return path


def _why_it_ends(
    parent: Node, tokens: tuple[int, ...], agreed: int, nearest: Node | None
) -> MissKind:
    """Return whether the cached continuation of `parent` differs after `agreed` tokens; `nearest`
    is a child that has these, if known.
    """
    if agreed == 0:
        return MissKind.DIFFERENCE if parent.children else MissKind.END
    if nearest is not None and len(nearest.tokens) > agreed:
        return MissKind.DIFFERENCE
    same = takewhile(lambda found: found[1] == agreed, parent.alike(tokens))
    longer = any(len(child.tokens) > agreed for child, _ in same)
    return MissKind.DIFFERENCE if longer else MissKind.END
