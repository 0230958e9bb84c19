"""The scheduler: chooses the tokens and blocks of each step. Pure Python.

There is no prefill phase and no decode phase. Each step takes the next rows of every sequence that
generates (one, plus its drafts). It then fills a budget of prompt tokens (`prefill_budget`), which
is split so that long and short prompts both make progress (`prefill_split`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.cache.block_manager import BlockManager
from quire.cache.reuse import MissKind
from quire.cache.specs import KVGroup
from quire.constraints.masks import TokenMask
from quire.core.errors import RequestError
from quire.core.kv_format import KVFormat
from quire.core.request import Failure, FinishReason, Output, Request
from quire.sampling.acceptance import count_accepted
from quire.scheduler.admission import SchedulerConfig
from quire.scheduler.deadlines import Deadlines
from quire.scheduler.draft_lengths import EveryDraft
from quire.scheduler.drafting import Drafting
from quire.scheduler.drafts import NO_DRAFT, Draft, Foreseen
from quire.scheduler.fairness import WaitingQueue
from quire.scheduler.limits import Limits
from quire.scheduler.plan import GraphRows, SampledTokens, StepPlan, StepResult
from quire.scheduler.planner import Planner
from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.prefix_sharing import ReadAhead
from quire.scheduler.sequence import Sequence, SequenceParts, Status


class _Accepted(NamedTuple):
    """The new tokens of a sequence from one step, to be reported.

    Attributes:
        foreseen: drafters' guesses of these tokens, verified or not.
        draft: the draft that the step verified.
        accepted: number of the draft's tokens that were accepted.
        sampled: the new tokens: the accepted ones and the one sampled after them.
    """

    sequence: Sequence
    foreseen: tuple[Foreseen, ...]
    draft: Draft
    accepted: int
    sampled: SampledTokens

    def count_drafts(self, drafting: Drafting) -> None:
        """Report to drafting how many drafted tokens were accepted."""
        if self.foreseen or self.draft.tokens:
            drafting.observe(self.sequence, self.foreseen, self.draft, accepted=self.accepted)


class Scheduler:
    """Owner of every sequence, the block manager and the prefix index.

    Args:
        identity: root of the block identities for (format, salt).
        clock: returns seconds, for deadlines and waiting times.
        graph_rows: see `Planner`.
        drafting: see `Planner`; None turns drafting off.
        read_ahead: see `PrefixSharing`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        groups: tuple[KVGroup, ...],
        manager: BlockManager,
        prefill_budget: PrefillBudget,
        identity: Callable[[KVFormat, str], bytes],
        clock: Callable[[], float] = time.monotonic,
        graph_rows: Callable[[KVFormat, bool], GraphRows] = lambda format, media: GraphRows(),
        drafting: Drafting | None = None,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self.config = config
        self.groups = groups
        self.manager = manager
        self.limits = Limits(
            groups, manager, block_size=config.block_size, max_context=config.max_context
        )
        self.prefill_budget = prefill_budget
        self.drafting = drafting or Drafting((), EveryDraft(), 0)
        self._planner = Planner(
            config,
            groups,
            manager=manager,
            prefill_budget=prefill_budget,
            fail=self._fail,
            clock=clock,
            graph_rows=graph_rows,
            drafting=self.drafting,
            read_ahead=read_ahead,
        )
        self._admission = self._planner.admission
        self.sharing = self._planner.sharing
        self.encodings = self._planner.encodings
        self.counters = self._planner.counters
        self._formats: dict[KVFormat, KVFormat] = {}
        """Interned KV formats: equal formats of different requests are one object."""
        self._by_id: dict[str, Sequence] = {}
        self._by_number: dict[int, Sequence] = {}
        self._deadlines = Deadlines()
        self._identity = identity
        self._clock = clock
        self._arrived = 0
        self._ended: list[int] = []
        """Numbers of ended sequences that no plan has reported yet."""
        self._outbox: list[Output | _Accepted] = []

    # -- requests come and go ------------------------------------------------------------------

    @property
    def running(self) -> Seq[Sequence]:
        """The sequences that hold blocks, oldest first."""
        return self._admission.running

    @property
    def waiting(self) -> WaitingQueue:
        """The sequences that hold no blocks; those of each API key in order."""
        return self._admission.waiting

    def users_of(self, adapter: str) -> int:
        """Return how many unfinished requests name an adapter."""
        return sum(each.request.adapter == adapter for each in self._by_id.values())

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or its last output not yet taken."""
        return bool(self._by_id or self._outbox)

    @property
    def waits_for_disk(self) -> bool:
        """Whether any request waits for blocks that are being read. For when nothing runs."""
        return any(sequence.prefix.waits_for_disk for sequence in self.waiting)

    def add(
        self,
        request: Request,
        format: KVFormat,
        parts: SequenceParts | None = None,
    ) -> None:
        """Queue a request.

        Args:
            parts: objects made for the request; None for plain text.

        Raises:
            RequestError: the request could never be served; nothing was queued.
        """
        parts = parts or SequenceParts()
        context = self.limits.check(request, format, parts.cross_media)
        if request.id in self._by_id:
            raise RequestError(f"id: {request.id!r} is already being served", param="id")
        format = self._formats.setdefault(format, format)
        identity = self._identity(format, request.cache_salt)
        sequence = Sequence(request, format, identity=identity, number=self._arrived, parts=parts)
        self._arrived += 1
        sequence.max_context = context
        if sequence.drafting is not None:
            sequence.drafting.may_follow = self._planner.may_follow(sequence)
        sequence.arrived = self._clock()
        if request.deadline_s is not None:
            self._deadlines.set(sequence.number, sequence.arrived + request.deadline_s)
        if request.task.needs_every_row:
            self.sharing.ignore(sequence, MissKind.EVERY_TOKEN_NEEDED)
        self._by_id[request.id] = self._by_number[sequence.number] = sequence
        self.encodings.start(sequence)
        self._admission.waiting.add(sequence)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request before the next step. Unknown ids are ignored: the request may just have
        ended.
        """
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._finish(sequence, reason)

    def start_over(self, failure: Failure) -> None:
        """Recover from a failed step: end every request that has blocks, and drop all blocks.

        Waiting requests stay. A token that was sampled but never read is sampled again with the
        same randomness, which comes from seed and position.
        """
        for sequence in list(self.running):
            self._fail(sequence, failure)
        for sequence in self.waiting:
            sequence.progress.drop_steps()
        self._admission.forget()
        self.encodings.clear()
        self.sharing.index.clear()
        self._planner.tables.cross.clear()
        self.manager.reset()

    # -- planning ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None when no sequence can move before the host reads tokens.

        If `drafting.wants_tokens`, call `update` first; otherwise sequences sit a step out.
        """
        self._expire()
        plan = self._planner.plan(tuple(self._ended))
        if plan is not None:
            self._ended.clear()
        return plan

    def _expire(self) -> None:
        for number in self._deadlines.take_passed(self._clock()):
            sequence = self._by_number[number]
            limit = sequence.request.deadline_s
            message = f"the request was not finished within {limit:g} s"
            self._fail(sequence, Failure(message, 408, "timeout_error"))

    # -- tokens come back ----------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Process the result of a step: append tokens, settle drafts, and queue outputs.

        It does what the next plan depends on. The rest is left to `take_outputs`, because the
        device may be waiting for that plan.
        """
        self.encodings.made(result.features)
        for rows in plan.sequences:
            sequence = self._by_number.get(rows.number)
            if sequence is None:
                continue  # it ended meanwhile
            if rows.sampling:
                self._accept(sequence, result.tokens[rows.number])
                if guesses := result.guesses.get(rows.number):
                    self.drafting.foresee(sequence, guesses)
            elif rows.number in result.vectors:
                self._finish(sequence, FinishReason.STOP, vector=result.vectors[rows.number])
            elif sequence.progress.generated == 0 and rows.end < sequence.progress.prompt_length:
                self._outbox.append(_output(sequence, sampled=None)._replace(read=rows.end))

    def masks(self, plan: StepPlan) -> dict[int, TokenMask | None]:
        """Return the masks that sequences of a plan awaited, by sequence number.

        Call it after `update` for the previous step. Sequences that this step ended have no mask.
        """
        awaiting = (each.number for each in plan.sequences if each.awaits_mask)
        known = ((number, self._by_number.get(number)) for number in awaiting)
        return {number: each.row.mask for number, each in known if each is not None}

    def take_outputs(self) -> list[Output]:
        """Return the outputs since the last call, including final ones."""
        queued, self._outbox = self._outbox, []
        outputs = []
        for each in queued:
            if isinstance(each, _Accepted):
                if each.foreseen or each.draft is not NO_DRAFT:
                    each.count_drafts(self.drafting)
                outputs.append(_output(each.sequence, each.sampled))
            else:
                outputs.append(each)
        return outputs

    def _accept(self, sequence: Sequence, sampled: SampledTokens) -> None:
        progress = sequence.progress
        draft, tokens = progress.end(), sampled.tokens
        if len(progress.tokens) == progress.prompt_length:
            self.drafting.begin(sequence)
        state = sequence.drafting
        foreseen = state.take_foreseen() if state is not None and state.foreseen else ()
        if draft.tokens:
            tokens = tokens[: count_accepted(draft.tokens, tokens)]
            self._settle(sequence, rejected=len(draft.tokens) + 1 - len(tokens))
        taken = 0
        reason = failure = None
        try:
            while taken < len(tokens) and reason is None:
                progress.append(tokens[taken])
                self.counters.generated_tokens += 1
                taken += 1
                reason = self._reason_to_end(sequence, tokens[taken - 1])
            if reason is None and sequence.constraint is not None:
                sequence.row.mask = sequence.constraint.mask()
        except RequestError as error:
            failure = Failure.of(error)
        except Exception as error:  # a constraint's fault ends its own request, whatever it is
            failure = Failure(f"the constraint on this answer failed: {error}")
        kept = sampled
        if taken < len(sampled.tokens):
            kept = SampledTokens(tokens[:taken], sampled.logprobs[:taken])
        accepted = _Accepted(sequence, foreseen, draft, accepted=len(tokens) - 1, sampled=kept)
        if failure is not None:
            accepted.count_drafts(self.drafting)
            self._fail(sequence, failure)
            return
        if sequence.status is Status.RUNNING:
            self.sharing.register((sequence,))
        if reason is None:
            if progress.drafts and progress.drafts[0] is not NO_DRAFT:
                self.drafting.settle(sequence, accepted.accepted)
            self._outbox.append(accepted)
            return
        accepted.count_drafts(self.drafting)
        self._finish(sequence, reason, sampled=kept)

    def _settle(self, sequence: Sequence, rejected: int) -> None:
        """Discard the last `rejected` computed tokens, which are rejected drafts. The rows of a
        step that is planned already then begin earlier by as many tokens.
        """
        if sequence.status is Status.RUNNING:
            progress = sequence.progress
            tables, kept = self._planner.tables, progress.computed - rejected
            progress.computed = tables.settle(sequence, kept)
            tables.release_passed((sequence,))

    def _reason_to_end(self, sequence: Sequence, token: int) -> FinishReason | None:
        progress = sequence.progress
        if token in sequence.request.stop_token_ids:
            return FinishReason.STOP
        if sequence.constraint is not None:
            sequence.constraint.accept(token)
        if sequence.loops is not None and sequence.loops.push(token):
            return FinishReason.LOOP
        if len(progress.tokens) - progress.prompt_length >= sequence.request.max_tokens:
            return FinishReason.LENGTH
        if len(progress.tokens) >= sequence.max_context:
            return FinishReason.LENGTH
        return None

    # -- the end -------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, failure: Failure) -> None:
        self._finish(sequence, FinishReason.ERROR, failure=failure)

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
        self._deadlines.drop(sequence.number)
        if sequence.status is Status.RUNNING:
            self._admission.vacate(sequence)
        else:
            self._admission.waiting.remove(sequence)
        self.encodings.end(sequence)
        self.drafting.forget(sequence)
        sequence.status = Status.FINISHED
        self._ended.append(sequence.number)
        self.counters.finished[reason.value] += 1
        self._outbox.append(_output(sequence, sampled, finish=reason, error=failure, vector=vector))


def _output(
    sequence: Sequence,
    sampled: SampledTokens | None,
    finish: FinishReason | None = None,
    error: Failure | None = None,
    vector: tuple[float, ...] | None = None,
) -> Output:
    return Output(
        request_id=sequence.request.id,
        token_ids=() if sampled is None else sampled.tokens,
        logprobs=() if sampled is None else sampled.logprobs,
        finish=finish,
        error=error,
        prompt_tokens=sequence.progress.prompt_length,
        cached_tokens=sequence.prefix.cached,
        reuse=sequence.prefix.reason,
        queued_s=sequence.queued_s,
        vector=vector,
        accepted_drafts=0 if sequence.drafting is None else sequence.drafting.accepted,
        rejected_drafts=0 if sequence.drafting is None else sequence.drafting.rejected,
    )
