"""Rows of a plan under construction, and their conversion to a snapshot."""

from __future__ import annotations

from collections.abc import Iterable

from quire.cache.blocks import Block
from quire.constraints.masks import TokenMask
from quire.core.media import PlacedMedia
from quire.sampling.rows import RowSampling
from quire.scheduler.drafts import NO_DRAFT, UNREAD, Draft
from quire.scheduler.plan import BlockCopy, CrossKeys, KVPlacement, ScheduledSequence
from quire.scheduler.sequence import Sequence


class PlannedRows:
    """Tokens `[start, start + count)` of one sequence. Made for every row of every step.

    Attributes:
        last: whether they end with the last known token, or with a draft.
        draft: drafted tokens, which are those of the last rows.
        draft_masks: mask of the token after each draft; empty without a constraint.
        awaits_mask: see `ScheduledSequence`.
        verified: see `ScheduledSequence`.
        snapshots: slots that also get the recurrent state after the last row.
        end: one past the last row's token.
        samples: whether the rows yield a token.
    """

    __slots__ = (
        "awaits_mask",
        "count",
        "draft",
        "draft_masks",
        "end",
        "last",
        "samples",
        "sequence",
        "snapshots",
        "start",
        "verified",
    )

    def __init__(
        self,
        sequence: Sequence,
        start: int,
        count: int,
        *,
        last: bool,
        draft: Draft = NO_DRAFT,
        draft_masks: tuple[TokenMask | None, ...] = (),
        awaits_mask: bool = False,
        verified: tuple[int, ...] = (),
    ) -> None:
        self.sequence, self.start, self.count, self.last = sequence, start, count, last
        self.draft, self.draft_masks, self.awaits_mask = draft, draft_masks, awaits_mask
        self.verified = verified
        self.snapshots: list[Block] = []
        self.end = start + count
        self.samples = last and sequence.request.task.samples

    def scheduled(
        self, placement: KVPlacement, crossed: tuple[CrossKeys, ...] = ()
    ) -> ScheduledSequence:
        """Return the snapshot."""
        sequence, request = self.sequence, self.sequence.request
        start, end = self.start, self.end
        samples = self.samples
        tokens = sequence.progress.tokens[start:end]
        spares: tuple[tuple[int, int], ...] = ()
        if drafts := self.draft.tokens:
            if drafts[0] != UNREAD:
                tokens.extend(drafts)
            spares = tuple((group, slot.id) for group, slot in sequence.blocks.spares.items())
        sampling: tuple[RowSampling, ...] = ()
        if samples:
            known, masked = sequence.progress.tokens, not self.awaits_mask
            sampling = sequence.row.rows(
                known, end - len(drafts), drafts, draft_masks=self.draft_masks, masked=masked
            )
        return ScheduledSequence(
            id=request.id,
            number=sequence.number,
            format=sequence.format,
            start=start,
            count=self.count,
            tokens=tokens,
            positions=sequence.positions.of(start, end),
            placement=placement,
            pooled=0 if samples else self._pooled(),
            completes=self.last,
            sampling=sampling,
            awaits_mask=self.awaits_mask,
            task=request.task,
            media=self._media() if request.media else (),
            snapshots=self._snapshots() if self.snapshots else (),
            drafted_states=spares,
            crossed=crossed,
            next_token=None if samples else self._next_token(end),
            adapter=request.adapter,
            verified=self.verified,
            run=self.draft.run,
        )

    def _snapshots(self) -> tuple[tuple[int, int], ...]:
        return tuple((slot.pool.group, slot.id) for slot in self.snapshots)

    def _next_token(self, end: int) -> int | None:
        known = self.sequence.progress.tokens
        return known[end] if end < len(known) else None

    def _pooled(self) -> int:
        task = self.sequence.request.task
        if task.samples:
            return 0
        return self.count if task.needs_every_row else int(self.last)

    def _media(self) -> tuple[PlacedMedia, ...]:
        start, end, request = self.start, self.end, self.sequence.request
        if start >= len(request.prompt):
            return ()
        return tuple(each for each in request.media if each.start < end and each.end > start)


def block_copies(pairs: Iterable[tuple[Block, Block]]) -> tuple[BlockCopy, ...]:
    """Return copies of blocks (from, to) as a snapshot."""
    return tuple(BlockCopy(source.pool, source.id, target.id) for source, target in pairs)
