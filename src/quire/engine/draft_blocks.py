"""Drafts by a DFlash drafter: a block of tokens at once, from hidden states of the model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import mlx.core as mx

from quire.cache.pools import Pools
from quire.core.media import MediaItem, PlacedMedia
from quire.engine.draft_model import PLAIN, Job, guess_sampling, reading
from quire.engine.draft_states import StatesDrafter
from quire.executor.computed import Computed
from quire.executor.eager import EagerExecutor
from quire.executor.encoder_cache import EncoderCache
from quire.executor.hidden_rows import HiddenRows
from quire.executor.inputs import StepInputs
from quire.models.dflash import DFlash
from quire.models.media_rows import MediaRows
from quire.scheduler.drafts import Draft, DraftQuery
from quire.scheduler.plan import ScheduledSequence, StepPlan


class _NoMedia(EncoderCache):
    """Media without encoders: blocks, which are items only in that their rows see each other."""

    def rows(self, sequences: Sequence[ScheduledSequence]) -> MediaRows | None:
        return None


class BlockExecutor(EagerExecutor):
    """Runs the steps of a DFlash drafter. Implements `Executor`.

    A step either reads the model's states of known tokens, or computes blocks.

    Args:
        states, offsets: see `HeadExecutor`.
    """

    def __init__(
        self, drafter: DFlash, pools: Pools, states: HiddenRows, offsets: dict[int, int]
    ) -> None:
        super().__init__(drafter, pools)
        self.media = _NoMedia({}, self.contents.features)
        self._drafter, self._states, self._offsets = drafter, states, offsets

    def _run(self, inputs: StepInputs) -> Computed:
        if inputs.sequences[0].sampled:
            return super()._run(inputs)
        given = [
            self._states.rows(each.number, self._offsets[each.number] + each.start, each.count)
            for each in inputs.sequences
        ]
        return Computed(self._drafter.read(inputs, mx.concatenate(given)))


class BlockDrafter(StatesDrafter):
    """Drafts blocks. It reads all tokens but the last one, with which a block begins."""

    skipped = 0

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft | None]:
        self._lasts = {query.number: query.tokens[-1] for query in queries}
        return super().propose(queries)

    def _own(self, query: DraftQuery) -> DraftQuery | None:
        own = super()._own(query)
        if own is None:
            return None
        drafter = self._model
        assert isinstance(drafter, DFlash), "blocks are a DFlash drafter's"
        return own._replace(tokens=own.tokens[:-1], limit=min(own.limit, drafter.block - 1))

    def _end(self, read: int, guesses: int) -> int:
        return read + (guesses + 1 if guesses else 0)

    def _run(self, jobs: list[Job]) -> int:
        reads = [reading(job)._replace(sampling=()) for job in jobs if job.rows]
        self._launch(StepPlan(tuple(reads), self._manager.take_changes()))
        if blocks := [self._block(job) for job in jobs if job.guesses]:
            self._launch(StepPlan(tuple(blocks)))
        self._launch(plan=None)
        self._collect(jobs)
        return 1 + bool(blocks)

    def _block(self, job: Job) -> ScheduledSequence:
        """Return the rows of a block: the last token, and a mask for each guess."""
        drafter, number = self._model, job.query.number
        assert isinstance(drafter, DFlash), "blocks are a DFlash drafter's"
        start, count = job.start + job.rows, 1 + job.guesses
        return ScheduledSequence(
            id=job.query.request.id,
            number=number,
            format=PLAIN,
            start=start,
            count=count,
            tokens=array("i", [self._lasts[number], *[drafter.mask] * job.guesses]),
            positions=range(start, start + count),
            placement=job.placement,
            sampling=tuple(guess_sampling(job, start + place) for place in range(1, count)),
            # Rows of an item see each other.
            media=(PlacedMedia(start, MediaItem("block", b"", (), tokens=count, digest=b"")),),
        )
