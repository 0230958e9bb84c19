"""Rows of a plan that is being made, and how they become part of the snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.cache.blocks import Block
from quire.core.media import PlacedMedia
from quire.sampling.rows import RowSampling
from quire.scheduler.plan import BlockCopy, CrossKeys, Placement, ScheduledSequence
from quire.scheduler.sequence import Sequence


@dataclass(slots=True)
class PlannedRows:
    """Tokens `[start, start + count)` of one sequence.

    Attributes:
        last: whether they end with the last token that is known, or with a draft.
        drafts: tokens of the last rows that are guesses.
        snapshots: slots that also get the recurrent state after the last row.
    """

    sequence: Sequence
    start: int
    count: int
    last: bool
    drafts: tuple[int, ...] = ()
    snapshots: list[Block] = field(default_factory=list)

    @property
    def end(self) -> int:
        """One past the last row's token."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """Whether the rows yield a token."""
        return self.last and self.sequence.request.task.samples

    def scheduled(
        self, placement: Placement, crossed: tuple[CrossKeys, ...] = ()
    ) -> ScheduledSequence:
        """The snapshot."""
        sequence, request = self.sequence, self.sequence.request
        start, end, drafts = self.start, self.start + self.count, self.drafts
        tokens = sequence.progress.tokens[start:end]
        sampled, pooled = 0, 0
        sampling: tuple[RowSampling, ...] = ()
        samples = request.task.samples
        if samples and self.last:
            sampled = 1 + len(drafts)
            sampling = sequence.row.rows(sequence.progress.tokens, end - len(drafts), drafts)
            if drafts:
                tokens.extend(drafts)
        elif not samples:
            pooled = self.count if request.task.needs_every_row else int(self.last)
        media: tuple[PlacedMedia, ...] = ()
        if request.media and start < len(request.prompt):
            media = tuple(p for p in request.media if p.start < end and p.end > start)
        snapshots: tuple[tuple[int, int], ...] = ()
        if self.snapshots:
            snapshots = tuple((slot.pool.group, slot.id) for slot in self.snapshots)
        spares: tuple[tuple[int, int], ...] = ()
        if drafts:
            spares = tuple((group, slot.id) for group, slot in sequence.blocks.spares.items())
        return ScheduledSequence(
            id=request.id,
            number=sequence.number,
            format=sequence.format,
            start=start,
            count=self.count,
            tokens=tokens,
            positions=sequence.positions.of(start, end),
            placement=placement,
            sampled=sampled,
            pooled=pooled,
            completes=self.last,
            sampling=sampling,
            task=request.task,
            media=media,
            snapshots=snapshots,
            drafted_states=spares,
            crossed=crossed,
        )


def block_copies(pairs: Iterable[tuple[Block, Block]]) -> tuple[BlockCopy, ...]:
    """(from, to) blocks as a snapshot."""
    return tuple(BlockCopy(source.pool, source.id, target.id) for source, target in pairs)
