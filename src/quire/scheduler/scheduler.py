"""The scheduler: which tokens of which sequences, in which blocks. Pure Python.

There is no prefill phase and no decode phase. Each step takes one token from every sequence that
generates, then fills a budget of prompt tokens (`prefill_budget`), split so that a long prompt
neither starves the others nor is starved by them (`prefill_split`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quire.cache.block_manager import Block, BlockManager, PoolKey
from quire.cache.index import Match
from quire.cache.specs import KVGroup, attention_groups
from quire.core.kv_format import KVFormat
from quire.errors import RequestError
from quire.request import Failure, FinishReason, Output, Request, TokenLogprobs
from quire.scheduler.limits import Limits, largest_image
from quire.scheduler.plan import StepPlan, Work
from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.prefill_split import PrefillSplit
from quire.scheduler.prefix_sharing import PrefixSharing
from quire.scheduler.sequence import Sequence


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
class Drawn:
    """What the host read for one sampled row."""

    token: int
    logprobs: TokenLogprobs | None = None


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
        self._attention = attention_groups(groups)
        self._whole_images = any(group.spec.sees_whole_images for group in groups)
        self._formats: dict[KVFormat, KVFormat] = {}
        """Equal formats of different requests, as one object."""
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._sequences: dict[str, Sequence] = {}
        self._identity = identity
        self._clock = clock
        self._order = 0
        self._prefill_split = PrefillSplit()
        self._outbox: list[Output] = []
        self._no_room: tuple[int, int] | None = None
        """Who (`order`) found no room last, and when: not asked again before a block came back."""

    # -- requests come and go ------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or its end not yet taken."""
        return bool(self._sequences or self._outbox)

    @property
    def waits_for_disk(self) -> bool:
        """Whether any request waits for blocks that are being read."""
        return any(sequence.waits_for_disk for sequence in self.waiting)

    def add(self, request: Request, format: KVFormat) -> Sequence:
        """Queues a request.

        Raises:
            RequestError: the request could never be served; nothing was queued.
        """
        self.limits.check(request, format)
        if request.id in self._sequences:
            raise RequestError(f"id: {request.id!r} is already being served", param="id")
        format = self._formats.setdefault(format, format)
        sequence = Sequence(
            request, format, self._identity(format, request.cache_salt), self._order
        )
        self._order += 1
        sequence.max_context = self.limits.context(format, largest_image(request))
        if request.deadline_s is not None:
            sequence.deadline = self._clock() + request.deadline_s
        self._sequences[request.id] = sequence
        self.waiting.append(sequence)
        return sequence

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step. Unknown ids are ignored: the race is harmless."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT)

    def start_over(self, failure: Failure) -> None:
        """A step failed: ends every request that has blocks, and forgets all blocks there are.

        What waits stays. A token that was drawn but never read is drawn again: its randomness
        comes from seed and position.
        """
        for sequence in list(self.running):
            self._finish(sequence, FinishReason.ERROR, failure=failure)
        for sequence in self.waiting:
            sequence.pending = 0
        self._no_room = None
        self.sharing.index.clear()
        self.manager.reset()

    # -- planning ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when no sequence can move before the host reads tokens."""
        self._expire()
        plan = StepPlan()
        self._plan_generation(plan)
        self._plan_prompts(plan)
        if not (plan.work or plan.copies):
            return None
        for work in plan.work:
            self._advance(work, plan)
        plan.changes = self.manager.take_changes()
        self.counters.steps += 1
        return plan

    def launched(self, plan: StepPlan) -> None:
        """The plan's block ids have been read: blocks that no later step needs may go."""
        for work in plan.work:
            self._release_passed(work.seq)
        self.manager.release_all(source for source, _ in plan.copies)
        self.manager.release_all(slot for _, slot in plan.saves)

    def _expire(self) -> None:
        now = self._clock()
        for sequence in list(self._sequences.values()):
            if sequence.deadline is not None and now >= sequence.deadline:
                limit = sequence.request.deadline_s
                failure = Failure(
                    f"the request was not finished within {limit:g} s", 408, "timeout_error"
                )
                self._finish(sequence, FinishReason.ERROR, failure=failure)

    def _plan_generation(self, plan: StepPlan) -> None:
        for sequence in list(self.running):
            if not self._may_draw(sequence) or sequence.computed != sequence.known - 1:
                continue
            if sequence.guide is not None and sequence.pending:
                continue  # the host must read the last token before it can say what may follow
            work = Work(sequence, sequence.computed, 1, sample=True)
            if self._make_room(work, plan):
                plan.work.append(work)

    def _may_draw(self, sequence: Sequence) -> bool:
        return (
            sequence.running
            and sequence.generated < sequence.request.max_tokens
            and sequence.known < sequence.max_context
        )

    def _plan_prompts(self, plan: StepPlan) -> None:
        # A sequence that resumes after pre-emption reads its own answer like a prompt. One with
        # a single token to go was planned as a generating row.
        prompts = [s for s in self.running if s.computed < s.known - 1]
        generating = len(plan.work)
        budget = self.prefill_budget.prompt_budget(generating, len(prompts) + len(self.waiting))
        self._admit(prompts, plan, budget)
        wants = [len(s.tokens) - s.computed for s in prompts]
        shares = self._prefill_split.split(budget, wants, self.prefill_budget.room(generating))
        for sequence, share in zip(prompts, shares, strict=True):
            if share == 0 or not sequence.running:
                continue
            images = 1 if generating else None
            work = self._chunk(sequence, min(share, self.sharing.until_snapshot(sequence)), images)
            fits = self._allocate(work)
            while not fits and work.count > self.config.page_tokens:
                smaller = self._chunk(sequence, work.count // 2, images)
                if smaller.count == work.count:
                    break  # a single image
                work, fits = smaller, self._allocate(smaller)
            if fits or self._make_room(work, plan):
                plan.work.append(work)

    def _chunk(self, sequence: Sequence, count: int, images: int | None) -> Work:
        """The next `count` tokens of a prompt, or somewhat more or fewer where there are images.

        Args:
            images: how many may be read, for their encoder takes time; None is no limit.
        """
        start = sequence.computed
        end = start + count
        read = [p for p in sequence.request.images if p.start < end and p.end > start]
        if images is not None and len(read) > images:
            end = read[images].start
        if self._whole_images and read and read[-1].start < end < read[-1].end:
            end = read[-1].start if read[-1].start > start else read[-1].end
        return Work(sequence, start, end - start, sample=end == len(sequence.tokens))

    def _admit(self, prompts: list[Sequence], plan: StepPlan, budget: int) -> None:
        """Moves waiting sequences to `prompts`, first come first served, while memory allows."""
        deferred: list[Sequence] = []
        looked_at = 0
        while self.waiting and len(self.running) < self.config.max_sequences:
            if len(prompts) >= max(1, budget):
                break
            sequence = self.waiting[0]
            if sequence.pending or self.sharing.must_wait(sequence):
                deferred.append(self.waiting.popleft())
                continue
            if looked_at > _LOOKED_AT or (sequence.order, self.manager.returned) == self._no_room:
                break
            looked_at += len(sequence.tokens)
            match = self.sharing.match(sequence)
            if match is None:
                deferred.append(self.waiting.popleft())
                continue
            if not self._start(sequence, match, plan):
                if self.running or sequence.afresh:
                    self._no_room = sequence.order, self.manager.returned
                    break
                sequence.afresh = True  # nobody will make room, and what it would reuse takes some
                continue
            self.waiting.popleft()
            prompts.append(sequence)
        self.waiting.extendleft(reversed(deferred))
        prompts.sort(key=lambda s: s.order)

    def _start(self, sequence: Sequence, match: Match, plan: StepPlan) -> bool:
        """Gives an admitted sequence its blocks: shared ones, and room for its whole prompt."""
        size = self.config.page_tokens
        shared = [p for table in match.blocks.values() for p in table if p is not None]
        sources = [*match.partial.values(), *match.snapshots.values()]
        for block in (*shared, *sources):
            self.manager.retain(block)
        wanted: dict[PoolKey, int] = {}
        total = -(-len(sequence.tokens) // size)
        for group in self.groups:
            missing = total - match.length // size
            wanted[PoolKey(group.index, sequence.format)] = group.spec.blocks_at_start(missing)
            if sequence.format.has_tail and group.index in self._attention:
                wanted[PoolKey(group.index, sequence.format, open=True)] = 1
        fits = self.manager.can_allocate(wanted)
        fresh = {key: self.manager.allocate(key, n) if fits else None for key, n in wanted.items()}
        if any(blocks is None for blocks in fresh.values()):
            for blocks in fresh.values():
                self.manager.release_all(blocks or [])
            self.manager.release_all([*shared, *sources])
            return False
        sequence.tables = []
        for group in self.groups:
            blocks = fresh[PoolKey(group.index, sequence.format)] or []
            source = match.partial.get(group.index) or match.snapshots.get(group.index)
            if source is not None:
                plan.copies.append((source, blocks[0]))
            table: list[Block | None] = list(match.blocks.get(group.index, []))
            sequence.tables.append(table + list(blocks))
        sequence.reading = None
        sequence.opens = {
            key.group: blocks[0] for key, blocks in fresh.items() if key.open and blocks
        }
        self.sharing.begin(sequence, match)
        if not sequence.started:
            self._count_start(sequence, match)
        sequence.running = True
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.order)
        return True

    def _count_start(self, sequence: Sequence, match: Match) -> None:
        sequence.started = True
        sequence.cached = match.length
        sequence.reuse = match.reason
        self.counters.prompt_tokens += sequence.prompt_length
        self.counters.cached_tokens += match.length
        if match.reason:
            self.counters.reuse_misses[match.reason.split(" at ")[0]] += 1

    # -- room ----------------------------------------------------------------------------------

    def _make_room(self, work: Work, plan: StepPlan) -> bool:
        """Pages for a piece of work, taken from the youngest sequences if need be.

        False when the sequence itself was the youngest and had to give way.
        """
        while not self._allocate(work):
            youngest = self.running[-1]
            if youngest is work.seq and len(self.running) == 1:
                if youngest.afresh:
                    failure = Failure("the KV memory budget cannot hold this request", 500)
                    self._finish(youngest, FinishReason.ERROR, failure=failure)
                    return False
                youngest.afresh = True  # what it copies from in this plan is in its way
            self._preempt(youngest, plan)
            if youngest is work.seq:
                return False
        return True

    def _allocate(self, work: Work) -> bool:
        """The blocks that hold the work's tokens; all of them or none."""
        sequence, size = work.seq, self.config.page_tokens
        count = (work.end - 1) // size + 1
        got: dict[int, list[Block]] = {}
        for index in self._attention:
            missing = count - len(sequence.tables[index])
            if missing <= 0:
                continue
            blocks = self.manager.allocate(PoolKey(index, sequence.format), missing)
            if blocks is None:
                for taken in got.values():
                    self.manager.release_all(taken)
                return False
            got[index] = blocks
        for index, blocks in got.items():
            sequence.tables[index].extend(blocks)
        return True

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Takes a sequence's blocks; it waits, first in line, and computes again what is lost."""
        self.counters.preemptions += 1
        self._withdraw(sequence, plan)
        self._vacate(sequence)
        sequence.computed = 0
        self.waiting.appendleft(sequence)

    def _withdraw(self, sequence: Sequence, plan: StepPlan) -> None:
        """Takes a sequence out of a plan that is being made."""
        plan.work = [work for work in plan.work if work.seq is not sequence]
        own = {block for table in sequence.tables for block in table}
        dropped = [copy for copy in plan.copies if copy[1] in own]
        if dropped:  # it began in this plan, and what it was to copy never came
            plan.copies = [copy for copy in plan.copies if copy[1] not in own]
            self.manager.release_all(source for source, _ in dropped)
            sequence.computed = 0

    # -- after a plan --------------------------------------------------------------------------

    def _advance(self, work: Work, plan: StepPlan) -> None:
        """Marks the work as computed; what follows in a later step may rely on it."""
        sequence = work.seq
        sequence.computed = work.end
        if work.sample:
            sequence.pending += 1
        self.sharing.register(sequence)
        plan.saves.extend(self.sharing.save_states(sequence))
        if work.sample:
            self.sharing.prompt_done(sequence)

    def _release_passed(self, sequence: Sequence) -> None:
        """Lets go of window blocks that no later token sees."""
        size = self.config.page_tokens
        for group, spec in self._attention.items():
            table = sequence.tables[group]
            number = min(spec.first_needed(sequence.computed) // size, len(table)) - 1
            while number >= 0 and (block := table[number]) is not None:
                self.manager.release(block)
                table[number] = None
                number -= 1

    # -- tokens come back ----------------------------------------------------------------------

    def update(self, plan: StepPlan, drawn: Mapping[str, Drawn]) -> list[Output]:
        """Takes in what a step drew, by request id, and says what each request got."""
        for work in plan.work:
            if not work.sample or work.seq.finished:
                continue
            self._accept(work.seq, drawn[work.seq.id])
        return self.take_outputs()

    def take_outputs(self) -> list[Output]:
        """What requests got since the last call, endings included."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def _accept(self, sequence: Sequence, drawn: Drawn) -> None:
        sequence.pending -= 1
        sequence.append(drawn.token)
        self.counters.generated_tokens += 1
        if sequence.running:
            self.sharing.register(sequence)
        try:
            reason = self._reason_to_end(sequence, drawn.token)
        except RequestError as error:
            failure = Failure(error.message, error.status, error.type, error.param, error.code)
            self._finish(sequence, FinishReason.ERROR, failure=failure)
            return
        except Exception as error:  # a guide's fault ends its own request, whatever it is
            failure = Failure(f"the constraint on this answer failed: {error}")
            self._finish(sequence, FinishReason.ERROR, failure=failure)
            return
        if reason is not None:
            self._finish(sequence, reason, drawn=drawn)
            return
        self._outbox.append(_output(sequence, drawn))

    def _reason_to_end(self, sequence: Sequence, token: int) -> FinishReason | None:
        if token in sequence.request.stop_token_ids:
            return FinishReason.STOP
        if sequence.guide is not None:
            sequence.guide.accept(token)
            sequence.mask = sequence.guide.mask()
        if sequence.loops is not None and sequence.loops.push(token):
            return FinishReason.LOOP
        if sequence.generated - sequence.pending >= sequence.request.max_tokens:
            return FinishReason.LENGTH
        if len(sequence.tokens) >= sequence.max_context:
            return FinishReason.LENGTH
        return None

    # -- the end -------------------------------------------------------------------------------

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        drawn: Drawn | None = None,
        failure: Failure | None = None,
    ) -> None:
        sequence.finished = True
        del self._sequences[sequence.id]
        if sequence.running:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
        self.counters.finished[reason.value] += 1
        self._outbox.append(_output(sequence, drawn, reason, failure))

    def _vacate(self, sequence: Sequence) -> None:
        """A running sequence gives back its blocks; what it computed stays for others to reuse."""
        sequence.running = False
        self.running.remove(sequence)
        self.sharing.prompt_done(sequence)
        self.sharing.register_tail(sequence)
        for table in sequence.tables:
            self.manager.release_all(table)
        self.manager.release_all(sequence.opens.values())
        sequence.tables = []
        sequence.page_ids.clear()
        sequence.opens = {}
        sequence.trail = None
        sequence.registered = 0


def _output(
    sequence: Sequence,
    drawn: Drawn | None,
    finish: FinishReason | None = None,
    error: Failure | None = None,
) -> Output:
    return Output(
        request_id=sequence.id,
        token_ids=() if drawn is None else (drawn.token,),
        logprobs=() if drawn is None or drawn.logprobs is None else (drawn.logprobs,),
        finish=finish,
        error=error,
        prompt_tokens=sequence.prompt_length,
        cached_tokens=sequence.cached,
        reuse=sequence.reuse,
    )
