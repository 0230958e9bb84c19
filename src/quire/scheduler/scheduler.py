"""The scheduler: which tokens of which sequences a step computes, in which blocks. Pure Python.

There is no prefill phase and no decode phase. Each step takes the next rows of every sequence that
generates (one, or as many more as there are drafts), then fills a budget of prompt tokens
(`prefill_budget`), split so that a long prompt neither starves the others nor is starved by them
(`prefill_split`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.cache.block_manager import Block, BlockManager
from quire.cache.specs import KVGroup
from quire.core.kv_format import KVFormat
from quire.errors import RequestError
from quire.request import Failure, FinishReason, Output, Request
from quire.sampling.acceptance import count_accepted
from quire.scheduler.block_tables import BlockTables
from quire.scheduler.limits import Limits, largest_image
from quire.scheduler.plan import SampledTokens, StepPlan, StepResult
from quire.scheduler.positions import TokenPositions
from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.prefill_split import PrefillSplit
from quire.scheduler.prefix_sharing import PrefixSharing
from quire.scheduler.rows import PlannedRows, block_copies
from quire.scheduler.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits that the scheduler keeps.

    Attributes:
        max_context: tokens a sequence may have, prompt and answer together.
        snapshot_every: tokens between two recurrent snapshots of a prompt.
    """

    page_tokens: int
    max_sequences: int
    max_context: int
    prefix_cache: bool = True
    snapshot_every: int = 2048


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    reuse_misses: Counter[str] = field(default_factory=Counter)


_LOOKED_AT = 1 << 17
"""Prompt tokens looked up in the prefix index for one step, about 5 ms; other prompts wait."""

_CATCH_UP = 16
"""Rows that a sequence with a proposer computes as it generates: after wrong drafts a recurrent
state is a few tokens behind."""


class Scheduler:
    """Owns every sequence, the block manager and the prefix index.

    Args:
        identity: root of the block identities for (format, salt).
        clock: seconds; for deadlines.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        groups: tuple[KVGroup, ...],
        manager: BlockManager,
        prefill_budget: PrefillBudget,
        identity: Callable[[KVFormat, str], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.groups = groups
        self.manager = manager
        self.limits = Limits(groups, manager, config.page_tokens, config.max_context)
        self.prefill_budget = prefill_budget
        self.sharing = PrefixSharing(
            groups, manager, config.page_tokens, config.snapshot_every, config.prefix_cache
        )
        self.counters = Counters()
        self._tables = BlockTables(groups, manager, config.page_tokens)
        self._whole_images = any(group.spec.sees_whole_images for group in groups)
        self._formats: dict[KVFormat, KVFormat] = {}
        """Equal formats of different requests, as one object."""
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._by_id: dict[str, Sequence] = {}
        self._by_number: dict[int, Sequence] = {}
        self._identity = identity
        self._clock = clock
        self._arrived = 0
        self._prefill_split = PrefillSplit()
        self._admitted: list[Sequence] = []
        """Those that began to run in the plan that is being made."""
        self._ended: list[int] = []
        """Numbers of those that no plan said of yet that they ended."""
        self._outbox: list[Output] = []
        self._no_room: tuple[int, int] | None = None
        """Who (`number`) found no room last, and when: not asked again before a block came back."""

    # -- requests come and go ------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or its end not yet taken."""
        return bool(self._by_id or self._outbox)

    @property
    def waits_for_disk(self) -> bool:
        """Whether any request waits for blocks that are being read."""
        return any(sequence.prefix.waits_for_disk for sequence in self.waiting)

    def add(
        self, request: Request, format: KVFormat, positions: TokenPositions | None = None
    ) -> Sequence:
        """Queues a request.

        Args:
            positions: of its tokens, where they are not the tokens' indices.

        Raises:
            RequestError: the request could never be served; nothing was queued.
        """
        self.limits.check(request, format)
        if request.id in self._by_id:
            raise RequestError(f"id: {request.id!r} is already being served", param="id")
        format = self._formats.setdefault(format, format)
        identity = self._identity(format, request.cache_salt)
        sequence = Sequence(request, format, identity, self._arrived, positions)
        self._arrived += 1
        sequence.max_context = self.limits.context(format, largest_image(request))
        if request.deadline_s is not None:
            sequence.deadline = self._clock() + request.deadline_s
        if request.task.needs_every_row:
            self.sharing.ignore(sequence, "every token is computed")
        self._by_id[request.id] = self._by_number[sequence.number] = sequence
        self.waiting.append(sequence)
        return sequence

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step. Unknown ids are ignored: the race is harmless."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT)

    def truncate(self, request_id: str, length: int) -> None:
        """Cuts a request back to its first `length` tokens, from which it goes on.

        What is in flight beyond them is dropped. Loop detection still counts what was cut.

        Raises:
            ValueError: the prompt would be cut, there are fewer tokens, or a constraint has
                followed those that would go.
        """
        sequence = self._by_id[request_id]
        progress = sequence.progress
        if not progress.prompt_length <= length <= len(progress.tokens):
            raise ValueError(f"a sequence of {len(progress.tokens)} tokens cut back to {length}")
        if sequence.constraint is not None:
            raise ValueError("what a token constraint has followed cannot be cut")
        keep = None
        if sequence.status is Status.RUNNING:
            keep = self._tables.cut(sequence, min(progress.certain, length - 1))
        progress.cut(length)
        if keep is not None:
            progress.computed = keep
            self.sharing.cut(sequence, keep)
            return
        if sequence.status is Status.RUNNING:  # too little is left: it finds in the index what is
            self._vacate(sequence)
            progress.computed = 0
            self.waiting.appendleft(sequence)
        self.sharing.cut(sequence, length)

    def start_over(self, failure: Failure) -> None:
        """A step failed: ends every request that has blocks, and forgets all blocks there are.

        What waits stays. A token that was sampled but never read is sampled again: its randomness
        comes from seed and position.
        """
        for sequence in list(self.running):
            self._finish(sequence, FinishReason.ERROR, failure=failure)
        for sequence in self.waiting:
            progress = sequence.progress
            progress.pending, progress.drafts, progress.unwanted = 0, (), 0
        self._no_room = None
        self.sharing.index.clear()
        self.manager.reset()

    # -- planning ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when no sequence can move before the host reads tokens."""
        self._expire()
        self._admitted = []
        plan: list[PlannedRows] = []
        self._plan_generation(plan)
        self._plan_prompts(plan)
        copies = [pair for sequence in self._admitted for pair in sequence.blocks.copies]
        if not plan and not copies:
            return None
        self.counters.steps += 1
        return self._freeze(plan, copies)

    def _freeze(self, plan: list[PlannedRows], copies: list[tuple[Block, Block]]) -> StepPlan:
        """The plan as a snapshot. Block ids are read last: making room may have changed them."""
        for rows in plan:
            self._advance(rows)
        changes = self.manager.take_changes()
        frozen = StepPlan(
            tuple(rows.scheduled(self._tables.place(rows.sequence)) for rows in plan),
            changes,
            block_copies(copies),
            tuple(self._ended),
        )
        self._ended.clear()
        # A block that goes now is not written before the next plan hands it out again.
        for rows in plan:
            self._tables.release_passed(rows.sequence)
            self.manager.release_all(rows.snapshots)
        for sequence in self._admitted:
            self._tables.drop_copies(sequence)
        return frozen

    def _expire(self) -> None:
        now = self._clock()
        for sequence in list(self._by_id.values()):
            if sequence.deadline is not None and now >= sequence.deadline:
                limit = sequence.request.deadline_s
                failure = Failure(
                    f"the request was not finished within {limit:g} s", 408, "timeout_error"
                )
                self._finish(sequence, FinishReason.ERROR, failure=failure)

    def _plan_generation(self, plan: list[PlannedRows]) -> None:
        for sequence in list(self.running):
            if not self._may_sample(sequence) or not _generates(sequence):
                continue
            start = sequence.progress.computed
            count = sequence.progress.known - start
            drafts: tuple[int, ...] = ()
            if sequence.proposer is not None:
                drafts = self._propose(sequence, sum(rows.count for rows in plan))
            rows = PlannedRows(sequence, start, count + len(drafts), True, drafts)
            if self._make_room(rows, plan):
                plan.append(rows)

    def _may_sample(self, sequence: Sequence) -> bool:
        progress, request = sequence.progress, sequence.request
        if progress.pending and (sequence.constraint or sequence.proposer):
            return False  # the host must read the last token before it can say what may follow
        return (
            sequence.status is Status.RUNNING
            and request.task.samples
            and progress.generated < request.max_tokens
            and progress.known < sequence.max_context
        )

    def _propose(self, sequence: Sequence, planned: int) -> tuple[int, ...]:
        """Drafts for the next rows, as many as there is room for without taking any from others.

        Args:
            planned: rows of the step so far.
        """
        progress = sequence.progress
        most = min(
            sequence.request.max_tokens - progress.generated,
            sequence.max_context - progress.known,
            self._tables.most_drafts(sequence) + 1,
            self.prefill_budget.room(planned),
        )
        if sequence.proposer is None or sequence.constraint is not None or most <= 1:
            return ()
        drafts = tuple(sequence.proposer.propose(progress.tokens, most - 1))[: most - 1]
        end = progress.known + len(drafts)
        if self._tables.reserve_spares(sequence) and self._tables.extend(sequence, end):
            return drafts
        self._tables.drop_spares(sequence)
        return ()

    def _plan_prompts(self, plan: list[PlannedRows]) -> None:
        # A sequence that resumes after pre-emption reads its own answer like a prompt. One with
        # a single token to go was planned as a generating row.
        prompts = [sequence for sequence in self.running if _reads(sequence)]
        generating = sum(rows.count for rows in plan)
        budget = self.prefill_budget.prompt_budget(generating, len(prompts) + len(self.waiting))
        self._admit(prompts, plan, budget)
        wants = [len(s.progress.tokens) - s.progress.computed for s in prompts]
        shares = self._prefill_split.split(budget, wants, self.prefill_budget.room(generating))
        for sequence, share in zip(prompts, shares, strict=True):
            if share == 0 or sequence.status is not Status.RUNNING:
                continue
            images = 1 if generating else None
            share = min(share, self.sharing.until_snapshot(sequence))
            rows = self._chunk(sequence, share, images)
            fits = self._tables.extend(sequence, rows.end)
            while not fits and rows.count > self.config.page_tokens:
                smaller = self._chunk(sequence, rows.count // 2, images)
                if smaller.count == rows.count:
                    break  # a single image
                rows, fits = smaller, self._tables.extend(sequence, smaller.end)
            if fits or self._make_room(rows, plan):
                plan.append(rows)

    def _chunk(self, sequence: Sequence, count: int, images: int | None) -> PlannedRows:
        """The next `count` tokens of a prompt, or somewhat more or fewer where there are images.

        Args:
            images: how many may be read, for their encoder takes time; None is no limit.
        """
        start = sequence.progress.computed
        end = start + count
        read = [p for p in sequence.request.images if p.start < end and p.end > start]
        if images is not None and len(read) > images:
            end = read[images].start
        if self._whole_images and read and read[-1].start < end < read[-1].end:
            end = read[-1].start if read[-1].start > start else read[-1].end
        return PlannedRows(sequence, start, end - start, end == len(sequence.progress.tokens))

    def _admit(self, prompts: list[Sequence], plan: list[PlannedRows], budget: int) -> None:
        """Moves waiting sequences to `prompts`, first come first served, while memory allows."""
        deferred: list[Sequence] = []
        looked_at = 0
        while self.waiting and len(self.running) < self.config.max_sequences:
            if len(prompts) >= max(1, budget):
                break
            sequence = self.waiting[0]
            progress = sequence.progress
            if progress.pending or self.sharing.must_wait(sequence):
                deferred.append(self.waiting.popleft())
                continue
            if looked_at > _LOOKED_AT or (sequence.number, self.manager.returned) == self._no_room:
                break
            looked_at += len(progress.tokens)
            match = self.sharing.match(sequence)
            if match is None:
                deferred.append(self.waiting.popleft())
                continue
            if not self._tables.admit(sequence, match):
                if self.running or sequence.prefix.ignored:
                    self._no_room = sequence.number, self.manager.returned
                    break
                # Nobody will make room, and what it would reuse takes some.
                self.sharing.ignore(sequence, "evicted")
                continue
            self.waiting.popleft()
            progress.computed = match.length
            if self.sharing.begin(sequence, match):
                self._count_start(sequence)
            sequence.status = Status.RUNNING
            self._admitted.append(sequence)
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.number)
            prompts.append(sequence)
        self.waiting.extendleft(reversed(deferred))
        prompts.sort(key=lambda s: s.number)

    def _count_start(self, sequence: Sequence) -> None:
        self.counters.prompt_tokens += sequence.progress.prompt_length
        self.counters.cached_tokens += sequence.prefix.cached
        if sequence.prefix.reason:
            self.counters.reuse_misses[sequence.prefix.reason.split(" at ")[0]] += 1

    # -- room ----------------------------------------------------------------------------------

    def _make_room(self, rows: PlannedRows, plan: list[PlannedRows]) -> bool:
        """Blocks for rows, taken from the youngest sequences if need be.

        False when the sequence itself was the youngest and had to give way.
        """
        sequence = rows.sequence
        while not self._tables.extend(sequence, rows.end):
            if self._tables.drop_spares(sequence):
                continue  # rows with drafts have their blocks already
            youngest = self.running[-1]
            if youngest is sequence and len(self.running) == 1:
                if youngest.prefix.ignored:
                    failure = Failure("the KV memory budget cannot hold this request", 500)
                    self._finish(youngest, FinishReason.ERROR, failure=failure)
                    return False
                # What it copies from in this plan is in its way.
                self.sharing.ignore(youngest, "evicted")
            self._preempt(youngest, plan)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, plan: list[PlannedRows]) -> None:
        """Takes a sequence's blocks; it waits, first in line, and computes again what is lost."""
        self.counters.preemptions += 1
        plan[:] = [rows for rows in plan if rows.sequence is not sequence]
        if self._tables.drop_copies(sequence):
            # It began in this plan, and what it was to copy never came.
            sequence.progress.computed = 0
        self._vacate(sequence)
        sequence.progress.computed = 0
        self.waiting.appendleft(sequence)

    # -- after a plan --------------------------------------------------------------------------

    def _advance(self, rows: PlannedRows) -> None:
        """Marks the rows as computed; what follows in a later step may rely on it."""
        sequence, progress = rows.sequence, rows.sequence.progress
        progress.computed = rows.end
        if rows.samples:
            progress.pending += 1
            progress.drafts = rows.drafts
        self._tables.advance(sequence)
        self.sharing.register(sequence)
        rows.snapshots = self.sharing.save_states(sequence)
        if rows.last:
            self.sharing.prompt_done(sequence)

    # -- tokens come back ----------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Takes in what a step computed, and says what each request got."""
        for rows in plan.sequences:
            sequence = self._by_number.get(rows.number)
            if sequence is None:
                continue  # it ended meanwhile
            if rows.sampled:
                self._accept(sequence, result.tokens[rows.number])
            elif rows.number in result.vectors:
                self._finish(sequence, FinishReason.STOP, vector=result.vectors[rows.number])
        return self.take_outputs()

    def take_outputs(self) -> list[Output]:
        """What requests got since the last call, endings included."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def _accept(self, sequence: Sequence, sampled: SampledTokens) -> None:
        progress = sequence.progress
        if progress.unwanted:
            progress.unwanted -= 1
            return
        progress.pending -= 1
        tokens = sampled.tokens
        if progress.drafts:
            tokens = tokens[: count_accepted(progress.drafts, tokens)]
            self._settle(sequence, progress.certain + len(tokens) - 1)
        taken = 0
        reason = None
        try:
            while taken < len(tokens) and reason is None:
                progress.append(tokens[taken])
                self.counters.generated_tokens += 1
                taken += 1
                reason = self._reason_to_end(sequence, tokens[taken - 1])
        except RequestError as error:
            self._finish(sequence, FinishReason.ERROR, failure=Failure.of(error))
            return
        except Exception as error:  # a constraint's fault ends its own request, whatever it is
            failure = Failure(f"the constraint on this answer failed: {error}")
            self._finish(sequence, FinishReason.ERROR, failure=failure)
            return
        if sequence.status is Status.RUNNING:
            self.sharing.register(sequence)
        got = SampledTokens(tokens[:taken], sampled.logprobs[:taken])
        if reason is not None:
            self._finish(sequence, reason, sampled=got)
            return
        self._outbox.append(_output(sequence, got))

    def _settle(self, sequence: Sequence, computed: int) -> None:
        """Of the rows in flight that were drafts, those up to `computed` tokens were right."""
        progress = sequence.progress
        if sequence.status is Status.RUNNING:
            progress.computed = self._tables.settle(sequence, computed)
        progress.drafts = ()

    def _reason_to_end(self, sequence: Sequence, token: int) -> FinishReason | None:
        progress = sequence.progress
        if token in sequence.request.stop_token_ids:
            return FinishReason.STOP
        if sequence.constraint is not None:
            sequence.constraint.accept(token)
            sequence.row.mask = sequence.constraint.mask()
        if sequence.loops is not None and sequence.loops.push(token):
            return FinishReason.LOOP
        if len(progress.tokens) - progress.prompt_length >= sequence.request.max_tokens:
            return FinishReason.LENGTH
        if len(progress.tokens) >= sequence.max_context:
            return FinishReason.LENGTH
        return None

    # -- the end -------------------------------------------------------------------------------

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        sampled: SampledTokens | None = None,
        failure: Failure | None = None,
        vector: tuple[float, ...] | None = None,
    ) -> None:
        del self._by_id[sequence.id], self._by_number[sequence.number]
        if sequence.status is Status.RUNNING:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self._ended.append(sequence.number)
        self.counters.finished[reason.value] += 1
        self._outbox.append(_output(sequence, sampled, reason, failure, vector))

    def _vacate(self, sequence: Sequence) -> None:
        """A running sequence gives back its blocks; what it computed stays for others to reuse."""
        sequence.status = Status.WAITING
        self.running.remove(sequence)
        self.sharing.end(sequence)
        self._tables.release(sequence)


def _generates(sequence: Sequence) -> bool:
    """Whether the next rows are the last known token's, and perhaps a few before it."""
    progress = sequence.progress
    behind = progress.known - progress.computed
    if behind == 1 or sequence.proposer is None:
        return behind == 1
    return progress.generated > 0 and 0 < behind <= _CATCH_UP


def _reads(sequence: Sequence) -> bool:
    """Whether a part of the prompt, or of an answer to resume, is to be computed."""
    progress = sequence.progress
    if not sequence.request.task.samples:
        return progress.computed < progress.known
    return progress.computed < progress.known - 1 and not _generates(sequence)


def _output(
    sequence: Sequence,
    sampled: SampledTokens | None,
    finish: FinishReason | None = None,
    error: Failure | None = None,
    vector: tuple[float, ...] | None = None,
) -> Output:
    return Output(
        request_id=sequence.id,
        token_ids=() if sampled is None else sampled.tokens,
        logprobs=() if sampled is None else sampled.logprobs,
        finish=finish,
        error=error,
        prompt_tokens=sequence.progress.prompt_length,
        cached_tokens=sequence.prefix.cached,
        reuse=sequence.prefix.reason or "",
        vector=vector,
    )
