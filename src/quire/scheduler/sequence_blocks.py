"""What one sequence holds of the pools."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from quire.cache.blocks import Block
from quire.scheduler.plan import BlockIds, KVPlacement

if TYPE_CHECKING:
    from quire.scheduler.cross_blocks import CrossEntry


class BlockTable:
    """The blocks of one sequence in one group, by block number; None where it let go of one."""

    __slots__ = ("_ids", "blocks")

    def __init__(self, blocks: list[Block | None]) -> None:
        self.blocks = blocks
        self._ids = array("i")

    def ids(self) -> BlockIds:
        """The ids as of now. Appends to the array that earlier snapshots share."""
        more = self.blocks[len(self._ids) :]
        self._ids.extend([0 if block is None else block.id for block in more])
        return BlockIds(self._ids, len(self.blocks))

    def renew(self) -> None:
        """Ids that were read may have changed: the next snapshot gets an array of its own."""
        self._ids = array("i")


class SequenceBlocks:
    """What a sequence holds of the pools. Written by `BlockTables`.

    Attributes:
        tables: by group; of a recurrent group, the slot of the state. Empty while it waits.
        tails: by group, the tail block in formats that have one.
        copies: (from, to) blocks to copy before the sequence's next rows are computed.
        spares: by group, the slot that gets the state after rows of which some are drafts.
        cross: by number in `Sequence.cross_media`, the blocks of media. Written by `CrossBlocks`.
        state_at: how many tokens the state in the sequence's own slots has taken in.
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
        """The blocks of a group, by block number."""
        return self.tables[group].blocks

    def state(self, group: int) -> Block:
        """The slot of a recurrent group's state."""
        block = self.tables[group].blocks[0]
        assert block is not None, "a state slot is never given back early"
        return block
