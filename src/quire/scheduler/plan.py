"""What one step does, decided. Fields explain themselves; the runner only carries them out."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.cache.block_manager import Block, Change
from quire.scheduler.sequence import Sequence


@dataclass(slots=True)
class Work:
    """Tokens `[start, start + count)` of one sequence.

    Attributes:
        sample: whether the last of them yields a new token.
    """

    seq: Sequence
    start: int
    count: int
    sample: bool

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(slots=True)
class StepPlan:
    """One step, in the order in which it is carried out.

    Attributes:
        changes: of the pools' arrays, and blocks to or from the disk tier, in order.
        copies: (from, to) blocks, before anything is written.
        work: rows to compute; those that generate come first.
        saves: (from, to) state slots, after everything is written.
    """

    work: list[Work] = field(default_factory=list)
    changes: tuple[Change, ...] = ()
    copies: list[tuple[Block, Block]] = field(default_factory=list)
    saves: list[tuple[Block, Block]] = field(default_factory=list)

    @property
    def decode_rows(self) -> int:
        """Sequences that take one token to draw the next."""
        return sum(1 for work in self.work if work.sample and work.count == 1)

    @property
    def prompt_rows(self) -> int:
        """Rows that read a prompt."""
        return sum(w.count for w in self.work) - self.decode_rows
