"""A draft model: a smaller model of the same vocabulary that guesses the next tokens.

It has an executor and KV pools of its own, whose bytes are part of the KV budget. For each sequence
it follows, it keeps the tokens that it has read, and the blocks that hold their keys and values.
All sequences are drafted together, one token of each per step of the draft model.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import Block
from quire.cache.reuse import Match, common_length
from quire.cache.specs import KVLayout, recurrent_groups
from quire.core.kv_format import KVFormat
from quire.core.request import Request, SamplingParams
from quire.core.speculation import DRAFT
from quire.executor.executor import Executor
from quire.models.weights.loader import LoadedModel
from quire.sampling.adjust import ADJUSTED
from quire.sampling.rows import RowSampling
from quire.scheduler.block_tables import BlockTables
from quire.scheduler.drafts import Draft, DraftQuery
from quire.scheduler.limits import Limits
from quire.scheduler.plan import BlockIds, KVPlacement, ScheduledSequence, StepPlan
from quire.scheduler.positions import TokenPositions
from quire.scheduler.sequence import Sequence as ModelSequence
from quire.scheduler.sequence import SequenceParts, Status
from quire.scheduler.step_times import StepTimes

_FIRST_READ, _MOST_READ = 32, 1024
"""Rows of a step of the draft model before any was measured, and at most. A longer prompt is read
beside several steps of the engine."""
_MOST_GUESSES = 8
"""Guesses of one sequence in a call."""
_FEW_READ = 17
"""Rows of a sequence that has its prompt behind it."""
PLAIN = KVFormat()


@dataclass(slots=True, eq=False)
class _Followed:
    """A sequence that the draft model follows.

    Attributes:
        own: its tokens and blocks, as the draft model has them.
        guessed: tokens whose keys and values lie after the known ones.
    """

    own: ModelSequence
    guessed: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Job:
    """The drafting of one sequence.

    Attributes:
        start: index of the first token that the draft model has not read.
        rows: number of tokens to read first.
        guesses: number of tokens to guess; 0 if a part of the prompt is left to read.
        shift: position in the sequence of the draft model's first token.
        placement: blocks of the step that reads.
        after: blocks of the steps after it. Recurrent states advance in other slots there.
    """

    query: DraftQuery
    followed: _Followed
    start: int
    rows: int
    guesses: int
    shift: int
    placement: KVPlacement
    after: KVPlacement
    tokens: list[int] = field(default_factory=list)


class ModelDrafter:
    """Drafts the tokens that a draft model samples.

    It samples with each position's own randomness, as the model that verifies does, so that both
    often sample the same token at any temperature.

    Args:
        loaded: the draft model.
        executor: runs its steps.
        budget: bytes for its KV blocks.
        read_s: seconds that it may read of prompts beside one step of the engine.
        clock: returns seconds.
    """

    name = DRAFT
    looks_ahead = False
    keeps_guesses = True
    """Whether the keys and values of right guesses stay."""

    def __init__(
        self,
        loaded: LoadedModel,
        executor: Executor,
        budget: int,
        block_size: int,
        read_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.kv_budget = budget
        self._model = loaded.model
        self._executor = executor
        groups = KVLayout.of(loaded.model.layout).groups
        self._manager = BlockManager(budget, self._executor.block_bytes)
        self._tables = BlockTables(groups, self._manager, block_size)
        limits = Limits(
            groups, self._manager, block_size=block_size, max_context=loaded.context_length
        )
        self._context = limits.context(PLAIN)
        self._recurrent = tuple(recurrent_groups(groups))
        self._followed: dict[int, _Followed] = {}
        """By sequence number, the one that was drafted longest ago first."""
        self._guess_times, self._read_times = StepTimes(), StepTimes()
        """Seconds of a guess by sequences, and of reading by rows."""
        self._read_s = read_s
        self._clock = clock

    def token_s(self, sequences: int) -> float:
        return self._guess_times.seconds(max(1, sequences)) or 0.0

    def reading_s(self, query: DraftQuery) -> float:
        unread = len(query.tokens) - (self._read(query.number) or 0)
        return 0.0 if unread <= _FEW_READ else self._read_times.seconds(unread) or 0.0

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft | None]:
        try:
            jobs = self._jobs(queries)
            if jobs:
                self._draft(list(jobs.values()))
        except Exception:  # raised again: after any error KV may be half written
            self._start_over()
            raise
        found: list[Draft | None] = []
        for query in queries:
            job = jobs.get(query.number)
            tokens = () if job is None else tuple(job.tokens)
            found.append(Draft(tokens, self.name) if tokens else None)
        return found

    def _read(self, number: int) -> int | None:
        """Return how many tokens of a sequence are read; None if it is not followed."""
        followed = self._followed.get(number)
        return None if followed is None else followed.own.progress.computed

    def _shift(self, number: int) -> int:
        """Return the position in a sequence of the draft model's first token."""
        return 0

    def forget(self, number: int) -> None:
        followed = self._followed.pop(number, None)
        if followed is not None:
            self._tables.release(followed.own)

    # -- what to read --------------------------------------------------------------------------

    def _jobs(self, queries: Iterable[DraftQuery]) -> dict[int, Job]:
        """Return the sequences to read and draft in this call, by number."""
        jobs: dict[int, Job] = {}
        room = max(_FIRST_READ, min(_MOST_READ, self._read_times.rows_within(self._read_s)))
        held = {query.number for query in queries}
        for query in queries:
            if room and self._serves(query):
                job = self._job(query, room, held)
                if job is not None:
                    jobs[query.number] = job
                    room -= job.rows
        # Block ids hold from here on: no more blocks are allocated in this call.
        for job in jobs.values():
            own = job.followed.own
            job.placement = self._tables.place(own)
            job.after = _with_spares(own, job.placement)
        return jobs

    def _serves(self, query: DraftQuery) -> bool:
        """Return whether the draft model can read a sequence and has room for its drafts."""
        length = len(query.tokens)
        if query.request.media or length + 1 >= self._context:
            return False
        known = self._followed.get(query.number)
        first = 0 if known is None else len(known.own.progress.tokens)
        return max(query.tokens[first:], default=0) < self._model.embedded_tokens

    def _job(self, query: DraftQuery, room: int, held: set[int]) -> Job | None:
        followed = self._follow(query, held)
        if followed is None:
            return None
        own = followed.own
        start, length = own.progress.computed, len(own.progress.tokens)
        rows = min(room, length - start)
        if not rows:
            return None  # the step that was to verify its last guesses had no room for it
        guesses = 0
        if start + rows == length:
            guesses = min(query.limit, _MOST_GUESSES, self._context - length)
        end = self._end(start + rows, guesses)
        while not self._extend(own, end, spares=guesses > 1):
            if not self._make_room(held):
                return None
        return Job(
            query,
            followed,
            start=start,
            rows=rows,
            guesses=guesses,
            shift=self._shift(query.number),
            placement=KVPlacement(()),
            after=KVPlacement(()),
        )

    def _end(self, read: int, guesses: int) -> int:
        """Return how many tokens need blocks, `read` of which are known."""
        return read + max(0, guesses - 1)

    def _follow(self, query: DraftQuery, held: set[int]) -> _Followed | None:
        """Return the draft model's copy of a sequence with all known tokens; None without room."""
        followed = self._followed.pop(query.number, None)
        if followed is not None:
            progress = followed.own.progress
            known = len(progress.tokens)
            if query.tokens[:known] != progress.tokens:  # it was cut back
                self._tables.release(followed.own)
                followed = None
            else:
                progress.tokens.extend(query.tokens[known:])
                # Guesses that came true are read already, but for the row that the next follows.
                if self.keeps_guesses and progress.computed == known and not self._recurrent:
                    new = tuple(progress.tokens[known:-1])
                    progress.computed += common_length(followed.guessed, new)
                followed.guessed = ()
        if followed is None:
            followed = self._start(query, held)
        if followed is not None:
            self._followed[query.number] = followed
        return followed

    def _start(self, query: DraftQuery, held: set[int]) -> _Followed | None:
        request = Request(query.request.id, tuple(query.tokens))
        own = ModelSequence(
            request,
            PLAIN,
            identity=b"",
            number=query.number,
            parts=SequenceParts(TokenPositions()),
        )
        own.max_context = self._context
        while not self._tables.admit(own, Match()):
            if not self._make_room(held):
                return None
        own.status = Status.RUNNING
        return _Followed(own)

    def _extend(self, own: ModelSequence, end: int, *, spares: bool) -> bool:
        if spares and self._recurrent:
            return self._tables.extend_for_drafts(own, end)
        return self._tables.extend(own, end)

    def _make_room(self, held: set[int]) -> bool:
        """Drop the sequence that was drafted longest ago and is not drafted now."""
        idle = next((number for number in self._followed if number not in held), None)
        if idle is None:
            return False
        self.forget(idle)
        return True

    # -- steps ---------------------------------------------------------------------------------

    def _draft(self, jobs: list[Job]) -> None:
        """Process the known tokens, then draft."""
        started = self._clock()
        steps = self._run(jobs)
        seconds = self._clock() - started
        most = max(job.guesses for job in jobs)
        if any(job.rows > _FEW_READ for job in jobs):
            self._read_times.observe(sum(job.rows for job in jobs), seconds / steps)
        elif most:
            self._guess_times.observe(len(jobs), seconds / most)
        for job in jobs:
            own = job.followed.own
            own.progress.computed = own.blocks.state_at = job.start + job.rows
            job.followed.guessed = tuple(job.tokens[:-1])
            self._tables.release_passed((own,))

    def _run(self, jobs: list[Job]) -> int:
        """Run the steps of some jobs; return their number. Tokens stay on the device meanwhile."""
        reads = [reading(job, job.followed.own.blocks.spares.values()) for job in jobs]
        self._launch(StepPlan(tuple(reads), self._manager.take_changes()))
        most = max(job.guesses for job in jobs)
        for depth in range(1, most):
            deeper = [_guessing(job, depth) for job in jobs if job.guesses > depth]
            self._launch(StepPlan(tuple(deeper)))
            self._collect(jobs)
        self._launch(plan=None)
        self._collect(jobs)
        return max(1, most)

    def _launch(self, plan: StepPlan | None) -> None:
        self._executor.flush()
        self._executor.launch(plan)

    def _collect(self, jobs: list[Job]) -> None:
        """Take the tokens of the step before the last launched one."""
        sampled = self._executor.collect().tokens
        for job in jobs:
            if job.query.number in sampled:
                job.tokens += sampled[job.query.number].tokens

    def _start_over(self) -> None:
        """Forget every sequence after a failed step."""
        for number in list(self._followed):
            self.forget(number)
        self._manager.reset()
        self._executor.clear()


def reading(job: Job, spares: Iterable[Block] = ()) -> ScheduledSequence:
    """Return the rows that process the known tokens and sample the first draft."""
    own, end = job.followed.own, job.start + job.rows
    sampling = (guess_sampling(job, end),) if job.guesses else ()
    return ScheduledSequence(
        id=own.id,
        number=own.number,
        format=PLAIN,
        start=job.start,
        count=job.rows,
        tokens=own.progress.tokens[job.start : end],
        positions=range(job.start, end),
        placement=job.placement,
        sampling=sampling,
        snapshots=tuple((slot.pool.group, slot.id) for slot in spares),
    )


def _guessing(job: Job, depth: int) -> ScheduledSequence:
    """Return the row of a guess, which is on the device, and samples the one after it."""
    own, start = job.followed.own, job.start + job.rows + depth - 1
    return ScheduledSequence(
        id=own.id,
        number=own.number,
        format=PLAIN,
        start=start,
        count=1,
        tokens=array("i"),
        positions=range(start, start + 1),
        placement=job.after,
        sampling=(guess_sampling(job, start + 1),),
    )


def _with_spares(own: ModelSequence, placement: KVPlacement) -> KVPlacement:
    """Return a placement whose recurrent states lie in the spare slots."""
    if not own.blocks.spares:
        return placement
    tables = list(placement.tables)
    for group, block in own.blocks.spares.items():
        tables[group] = BlockIds(array("i", [block.id]), 1)
    return replace(placement, tables=tuple(tables))


_NOT_GUESSED: dict[str, Any] = {
    each.name: each.default
    for each in fields(SamplingParams)
    if each.name in ADJUSTED | {"xtc_probability", "xtc_threshold", "logprobs"}
}
"""Sampling parameters that guesses do without, with the values that turn them off."""


def guess_sampling(job: Job, index: int) -> RowSampling:
    """Return how to sample the draft model's token `index`: as its request samples, without
    adjustments of logits, XTC and log-probabilities.
    """
    return RowSampling(replace(job.query.request.sampling, **_NOT_GUESSED), job.shift + index)
