"""The cached keys and values of media items, as a sequence and the block manager hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.cache.blocks import Block

Key = tuple[bytes, ...]
"""Key of a cached entry: the identity of a sequence's blocks (model, format, salt), then the items'
digests.
"""


class CrossEntry:
    """The blocks of a list of media items, by group. Implements `cache.blocks.Holder`.

    Args:
        on_evict: called with the entry and the evicted block.

    Attributes:
        users: number of sequences that hold the entry.
        written: whether a planned or finished step writes the blocks.
    """

    __slots__ = ("_on_evict", "blocks", "key", "users", "written")

    def __init__(
        self,
        on_evict: Callable[[CrossEntry, Block], None],
        key: Key,
        blocks: dict[int, list[Block]],
    ) -> None:
        self._on_evict = on_evict
        self.key = key
        self.blocks = blocks
        self.users = 1
        self.written = False

    @property
    def all(self) -> list[Block]:
        """Return the blocks of all groups."""
        return [block for blocks in self.blocks.values() for block in blocks]

    def name(self, block: Block) -> bytes | None:
        """Return None: these blocks never go to disk."""
        return None

    def tokens_in(self, block: Block) -> int:
        """Return 0: no token of a sequence is written to the block."""
        return 0

    def lost_with(self, block: Block) -> Iterable[Block]:
        """Return all blocks: an entry is useless without one of them."""
        return self.all

    def forget(self, block: Block) -> None:
        self._on_evict(self, block)
