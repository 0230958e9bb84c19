"""The blocks that one sequence holds in the pools."""

from __future__ import annotations

from array import array

from quire.cache.blocks import Block
from quire.scheduler.cross_entry import CrossEntry
from quire.scheduler.plan import BlockIds, KVPlacement


class BlockTable:
    """The blocks of one sequence in one group, by block number. Released blocks are None."""

    __slots__ = ("_ids", "blocks")

    def __init__(self, blocks: list[Block | None]) -> None:
        self.blocks = blocks
        self._ids = array("i")

    def ids(self) -> BlockIds:
        """Return the current ids. Appends to the array that earlier snapshots share."""
        more = self.blocks[len(self._ids) :]
        self._ids.extend([0 if block is None else block.id for block in more])
        return BlockIds(self._ids, len(self.blocks))

    def renew(self) -> None:
        """Start a new array for the next snapshot, because ids already in a snapshot have
        changed.
        """
        self._ids = array("i")


class SequenceBlocks:
    """The blocks and state slots of one sequence. Only `BlockTables` writes them.

    Attributes:
        tables: block tables by group; for a recurrent group, the state's slot. Empty while the
            request waits.
        tails: by group, the tail block in formats that have one.
        copies: (from, to) blocks to copy before the sequence's next rows are computed.
        spares: by group, the slot for the recurrent state after rows that include drafts.
        cross: blocks of media, by index in `Sequence.cross_media`. Written by `CrossBlocks`.
        state_at: number of tokens that the state in the sequence's own slots includes.
    """

    __slots__ = ("copies", "cross", "epoch", "placement", "spares", "state_at", "tables", "tails")

    def __init__(self) -> None:
        self.tables: list[BlockTable] = []
        self.tails: dict[int, Block] = {}
        self.copies: list[tuple[Block, Block]] = []
        self.spares: dict[int, Block] = {}
        self.cross: dict[int, CrossEntry] = {}
        self.state_at = 0
        self.placement: KVPlacement | None = None
        self.epoch = -1

    def table(self, group: int) -> list[Block | None]:
        """Return a group's blocks, by block number."""
        return self.tables[group].blocks

    def state(self, group: int) -> Block:
        """Return the slot of a recurrent group's state."""
        block = self.tables[group].blocks[0]
        assert block is not None, "a state slot is never given back early"
        return block
