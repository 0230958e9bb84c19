"""The scheduler: which tokens of which sequences, in which pages. Pure Python.

There is no prefill phase and no decode phase. Each step takes one token from every sequence that
generates, then fills a budget of prompt tokens: half for the oldest prompt, half for the shortest,
so that a long prompt neither starves the others nor is starved by them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from quire.cache.disk_recall import Prompt, Recall
from quire.cache.index import Match, Node, PrefixIndex, chain, common_length
from quire.cache.ledger import Ledger, Page, PoolKey
from quire.cache.specs import (
    FullKV,
    KVFormat,
    KVGroup,
    RecurrentState,
    WindowKV,
    first_visible,
)
from quire.errors import RequestError
from quire.request import Failure, FinishReason, Output, Request, TokenLogprobs
from quire.scheduler.pace import Pace
from quire.scheduler.plan import StepPlan, Work
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


class Scheduler:
    """Owns every sequence, the ledger and the prefix index.

    Args:
        identity: root of the page identities for (format, salt).
        clock: seconds; for deadlines.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        groups: tuple[KVGroup, ...],
        ledger: Ledger,
        pace: Pace,
        identity: Callable[[KVFormat, str], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.groups = groups
        self.ledger = ledger
        self.index = PrefixIndex(groups, ledger, config.page_tokens)
        self.pace = pace
        self.recall: Recall | None = None
        """Reads pages back, if there is a disk tier."""
        self.counters = Counters()
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._sequences: dict[str, Sequence] = {}
        self._computing: dict[bytes, Sequence] = {}
        self._identity = identity
        self._clock = clock
        self._order = 0
        self._outbox: list[Output] = []
        self._launched_pages: list[Page] = []

    # -- requests come and go ------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or its end not yet taken."""
        return bool(self._sequences or self._outbox)

    @property
    def waits_for_disk(self) -> bool:
        """Whether any request waits for pages that are being read."""
        return any(sequence.waits_for_disk for sequence in self.waiting)

    def add(self, request: Request, format: KVFormat) -> Sequence:
        """Queues a request.

        Raises:
            RequestError: the request could never be served; nothing was queued.
        """
        length = len(request.prompt)
        if length == 0:
            raise RequestError("prompt: must hold at least one token", param="prompt")
        if request.max_tokens < 1:
            raise RequestError("max_tokens: must be at least 1", param="max_tokens")
        if length >= self.config.max_context:
            raise RequestError(
                f"prompt: {length} tokens; prompt and answer together may have "
                f"{self.config.max_context}",
                param="prompt",
                code="context_length_exceeded",
            )
        if request.id in self._sequences:
            raise RequestError(f"id: {request.id!r} is already being served", param="id")
        need = self.worst_case_bytes(format, length + 1)
        if need > self.ledger.budget:
            raise RequestError(
                f"prompt: {length} tokens need {need} bytes of KV cache; "
                f"the server's budget is {self.ledger.budget}",
                param="prompt",
                code="kv_memory_exceeded",
            )
        sequence = Sequence(
            request, format, self._identity(format, request.cache_salt), self._order
        )
        self._order += 1
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

    def fail(self, request_id: str, failure: Failure) -> None:
        """Ends one request with an error; its neighbours do not notice."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ERROR, failure=failure)

    def start_over(self, failure: Failure) -> None:
        """A step failed: ends every request that has pages, and forgets all pages there are.

        What waits stays. A token that was drawn but never read is drawn again: its randomness
        comes from seed and position.
        """
        for sequence in list(self.running):
            self._finish(sequence, FinishReason.ERROR, failure=failure)
        for sequence in self.waiting:
            sequence.pending = 0
        self._launched_pages.clear()
        self.index.clear()
        self.ledger.reset()

    def fit_context(self, format: KVFormat) -> int:
        """Lowers `max_context` to what the budget holds for one sequence, and returns it."""
        low, high = 0, self.config.max_context
        while low < high:
            middle = (low + high + 1) // 2
            if self.worst_case_bytes(format, middle) <= self.ledger.budget:
                low = middle
            else:
                high = middle - 1
        self.config = replace(self.config, max_context=low)
        return low

    def worst_case_bytes(self, format: KVFormat, tokens: int) -> int:
        """Bytes of the pages that a lone sequence of so many tokens holds at most."""
        pages = -(-tokens // self.config.page_tokens)
        total = 0
        for group in self.groups:
            key = PoolKey(group.index, format)
            count = 1 if isinstance(group.spec, RecurrentState) else pages
            if isinstance(group.spec, WindowKV):
                count = min(pages, group.spec.window // self.config.page_tokens + 3)
            total += count * self.ledger.page_bytes(key)
            if format.seals and not isinstance(group.spec, RecurrentState):
                total += self.ledger.page_bytes(PoolKey(group.index, format, open=True))
        return total

    # -- planning ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None when no sequence can move before the host reads tokens."""
        self._expire()
        plan = StepPlan()
        self._plan_generation(plan)
        self._plan_prompts(plan, self.pace.prompt_budget(len(plan.work)))
        if not (plan.work or plan.copies):
            return None
        for work in plan.work:
            self._advance(work, plan)
        plan.changes = self.ledger.take_changes()
        self.counters.steps += 1
        return plan

    def launched(self, plan: StepPlan) -> None:
        """The plan's page ids have been read: pages that no later step needs may go."""
        for work in plan.work:
            self._release_passed(work.seq)
        self.ledger.release_all(self._launched_pages)
        self._launched_pages.clear()

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
            sequence in self.running
            and sequence.generated < sequence.request.max_tokens
            and sequence.known < self.config.max_context
        )

    def _plan_prompts(self, plan: StepPlan, budget: int) -> None:
        # A sequence that resumes after pre-emption reads its own answer like a prompt. One with
        # a single token to go was planned as a generating row.
        prompts = [s for s in self.running if s.computed < s.known - 1]
        self._admit(prompts, plan, budget)
        shares = _share(budget, [len(s.tokens) - s.computed for s in prompts])
        for sequence, share in zip(prompts, shares, strict=True):
            if share == 0 or sequence not in self.running:
                continue
            work = self._chunk(sequence, min(share, self._until_snapshot(sequence)))
            fits = self._allocate(work)
            while not fits and work.count > self.config.page_tokens:
                work = self._chunk(sequence, work.count // 2)
                fits = self._allocate(work)
            if fits or self._make_room(work, plan):
                plan.work.append(work)

    def _chunk(self, sequence: Sequence, count: int) -> Work:
        end = sequence.computed + count
        return Work(sequence, sequence.computed, count, sample=end == len(sequence.tokens))

    def _admit(self, prompts: list[Sequence], plan: StepPlan, budget: int) -> None:
        """Moves waiting sequences to `prompts`, first come first served, while memory allows."""
        deferred: list[Sequence] = []
        while self.waiting and len(self.running) < self.config.max_sequences:
            if len(prompts) >= max(1, budget):
                break
            sequence = self.waiting[0]
            if (
                sequence.pending
                or sequence.waits_on in self._computing
                or self._reads_disk(sequence)
            ):
                deferred.append(self.waiting.popleft())
                continue
            match = self._match(sequence)
            if match is None or sequence.waits_for_disk:
                deferred.append(self.waiting.popleft())
                continue
            if not self._start(sequence, match, plan):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.order)
            prompts.append(sequence)
        self.waiting.extendleft(reversed(deferred))
        prompts.sort(key=lambda s: s.order)

    def _match(self, sequence: Sequence) -> Match | None:
        """What the index has for a sequence; None if it had better wait for a neighbour's pages."""
        sequence.waits_on = None
        if not self.config.prefix_cache:
            return Match(reason="off")
        size = self.config.page_tokens
        limit = len(sequence.tokens) - 1
        keys = sequence.keys(limit // size, size)
        match = self.index.match(
            sequence.identity,
            sequence.tokens,
            keys,
            limit=limit,
            partial=not sequence.format.seals,
        )
        following = match.reached // size
        if following < len(keys) and keys[following] in self._computing:
            sequence.waits_on = keys[following]
            return None
        if self._has_recurrent and self._state_is_coming(sequence, match, keys[:following]):
            return None
        if self.recall is not None:
            prompt = Prompt(sequence.identity, sequence.format, sequence.tokens, keys)
            reading = self.recall.begin(prompt, match.length, sequence.reading)
            sequence.reading = reading or sequence.reading
        return match

    def _state_is_coming(self, sequence: Sequence, match: Match, keys: list[bytes]) -> bool:
        """Whether a neighbour will keep its recurrent state where the prompts still agree."""
        neighbour = self._computing.get(keys[-1]) if keys else None
        if neighbour is None:
            return False
        agree = min(len(sequence.tokens) - 1, common_length(sequence.tokens, neighbour.tokens))
        ahead = max(match.length, neighbour.computed - 1)
        return any(ahead < p <= agree for p in self._snapshot_positions(neighbour))

    def _reads_disk(self, sequence: Sequence) -> bool:
        """Whether a part of its beginning is still being read; what has come is in the index."""
        if self.recall is None or sequence.reading is None:
            return False
        return not self.recall.settle(sequence.reading)

    def _start(self, sequence: Sequence, match: Match, plan: StepPlan) -> bool:
        """Gives an admitted sequence its pages: shared ones, and room for its whole prompt."""
        size = self.config.page_tokens
        shared = [p for table in match.pages.values() for p in table if p is not None]
        sources = [*match.partial.values(), *match.snapshots.values()]
        for page in (*shared, *sources):
            self.ledger.retain(page)
        wanted: dict[PoolKey, int] = {}
        total = -(-len(sequence.tokens) // size)
        for group in self.groups:
            have = match.length // size
            wanted[PoolKey(group.index, sequence.format)] = self._first_pages(group, total, have)
            if sequence.format.seals and not isinstance(group.spec, RecurrentState):
                wanted[PoolKey(group.index, sequence.format, open=True)] = 1
        fits = self.ledger.can_allocate(wanted)
        fresh = {key: self.ledger.allocate(key, n) if fits else None for key, n in wanted.items()}
        if any(pages is None for pages in fresh.values()):
            for pages in fresh.values():
                self.ledger.release_all(pages or [])
            self.ledger.release_all([*shared, *sources])
            return False
        sequence.tables = []
        for group in self.groups:
            pages = fresh[PoolKey(group.index, sequence.format)] or []
            source = match.partial.get(group.index) or match.snapshots.get(group.index)
            if source is not None:
                plan.copies.append((source, pages[0]))
            table: list[Page | None] = list(match.pages.get(group.index, []))
            sequence.tables.append(table + list(pages))
        sequence.reading = None
        sequence.opens = {key.group: pages[0] for key, pages in fresh.items() if key.open and pages}
        self._launched_pages.extend(sources)
        self._begin(sequence, match)
        return True

    def _first_pages(self, group: KVGroup, total: int, have: int) -> int:
        """Pages to allocate on admission: all that full attention needs; of a window, the first."""
        if isinstance(group.spec, FullKV):
            return total - have
        return 1

    def _begin(self, sequence: Sequence, match: Match) -> None:
        size = self.config.page_tokens
        sequence.computed = match.length
        sequence.registered = match.length // size
        sequence.trail = self.index.root(sequence.identity)
        for key in sequence.keys(sequence.registered, size):
            child = self.index.child(sequence.trail, key)
            assert child is not None, "a matched page has no node"
            sequence.trail = child
        sequence.promised = sequence.keys(len(sequence.tokens) // size, size)[sequence.registered :]
        for key in sequence.promised:
            self._computing.setdefault(key, sequence)
        if not sequence.started:
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
                failure = Failure("the KV memory budget cannot hold this request", 500)
                self._finish(work.seq, FinishReason.ERROR, failure=failure)
                return False
            self._preempt(youngest, plan)
            if youngest is work.seq:
                return False
        return True

    def _allocate(self, work: Work) -> bool:
        """The pages that hold the work's tokens; all of them or none."""
        sequence, size = work.seq, self.config.page_tokens
        last = (work.end - 1) // size
        wanted: dict[PoolKey, int] = {}
        for group in self.groups:
            if isinstance(group.spec, RecurrentState):
                continue
            missing = last + 1 - len(sequence.tables[group.index])
            wanted[PoolKey(group.index, sequence.format)] = max(0, missing)
        got: dict[PoolKey, list[Page]] = {}
        for key, count in wanted.items():
            if count == 0:
                continue
            pages = self.ledger.allocate(key, count)
            if pages is None:
                for taken in got.values():
                    self.ledger.release_all(taken)
                return False
            got[key] = pages
        for key, pages in got.items():
            sequence.tables[key.group].extend(pages)
        return True

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Takes a sequence's pages; it waits, first in line, and computes again what is lost."""
        self.counters.preemptions += 1
        plan.work = [work for work in plan.work if work.seq is not sequence]
        own = {page for table in sequence.tables for page in table}
        plan.copies = [copy for copy in plan.copies if copy[1] not in own]
        self._vacate(sequence)
        sequence.computed = 0
        self.waiting.appendleft(sequence)

    # -- after a plan --------------------------------------------------------------------------

    def _advance(self, work: Work, plan: StepPlan) -> None:
        """Marks the work as computed; what follows in a later step may rely on it."""
        sequence = work.seq
        sequence.computed = work.end
        if work.sample:
            sequence.pending += 1
        self._register(sequence)
        self._save_states(sequence, plan)
        if work.sample:
            self._computed_all(sequence)

    def _register(self, sequence: Sequence) -> None:
        """Tells the index of pages that are full and whose tokens the host has read."""
        size = self.config.page_tokens
        full = sequence.confirmed // size
        if full == sequence.registered:
            return
        keys = sequence.keys(full, size)
        while sequence.registered < full:
            number = sequence.registered
            key = keys[number]
            if not self._has_recurrent and self._computing.get(key) is sequence:
                del self._computing[key]
            if self.config.prefix_cache and sequence.trail is not None:
                tokens = tuple(sequence.tokens[number * size : (number + 1) * size])
                pages = self._pages_at(sequence, number)
                sequence.trail = self.index.insert(sequence.trail, key, tokens, pages)
            sequence.registered += 1

    def _computed_all(self, sequence: Sequence) -> None:
        """Nobody need wait for this sequence's prompt any more."""
        for key in sequence.promised:
            if self._computing.get(key) is sequence:
                del self._computing[key]
        sequence.promised = []

    def _pages_at(self, sequence: Sequence, number: int) -> dict[int, Page]:
        pages = {}
        for group in self.groups:
            if not isinstance(group.spec, RecurrentState):
                table = sequence.tables[group.index]
                page = table[number] if number < len(table) else None
                if page is not None:
                    pages[group.index] = page
        return pages

    def _release_passed(self, sequence: Sequence) -> None:
        """Lets go of window pages that no later token sees."""
        size = self.config.page_tokens
        for group in self.groups:
            if isinstance(group.spec, WindowKV):
                table = sequence.tables[group.index]
                number = min(first_visible(group.spec, sequence.computed) // size, len(table)) - 1
                while number >= 0 and (page := table[number]) is not None:
                    self.ledger.release(page)
                    table[number] = None
                    number -= 1

    # -- recurrent state -----------------------------------------------------------------------

    def _until_snapshot(self, sequence: Sequence) -> int:
        """Tokens up to the next position whose recurrent state is to be kept, or to the end."""
        rest = len(sequence.tokens) - sequence.computed
        if not self._has_recurrent or not self.config.prefix_cache:
            return rest
        ahead = [p - sequence.computed for p in self._snapshot_positions(sequence)]
        return min([rest, *(a for a in ahead if a > 0)])

    @property
    def _has_recurrent(self) -> bool:
        return any(isinstance(group.spec, RecurrentState) for group in self.groups)

    def _snapshot_positions(self, sequence: Sequence) -> set[int]:
        """Message ends, the prompt's last token but one, and every so often between.

        Formats that seal are shared by whole pages, so there the positions are page boundaries.
        """
        size, every = self.config.page_tokens, self.config.snapshot_every
        length = sequence.prompt_length
        wanted = {*sequence.request.snapshots, *range(every, length, every), length - 1}
        if self.recall is not None:
            wanted.add((length - 1) // size * size)  # the disk holds states at page ends only
        if sequence.format.seals:
            wanted = {position // size * size for position in wanted}
        return {position for position in wanted if 0 < position < length}

    def _save_states(self, sequence: Sequence, plan: StepPlan) -> None:
        """Keeps a copy of the state where another prompt is likely to part from this one."""
        if not self._has_recurrent or not self.config.prefix_cache or sequence.pending:
            return
        if sequence.computed not in self._snapshot_positions(sequence):
            return
        node = self._tail_node(sequence)
        offset = (sequence.computed - 1) % self.config.page_tokens + 1
        for group in self.groups:
            if node is None or not isinstance(group.spec, RecurrentState):
                continue
            pages = self.ledger.allocate(PoolKey(group.index, sequence.format), 1)
            state = sequence.tables[group.index][0]
            if pages is None or state is None:
                return
            if self.index.insert_snapshot(node, offset, pages[0]):
                plan.saves.append((state, pages[0]))
            self._launched_pages.append(pages[0])

    def _tail_node(self, sequence: Sequence) -> Node | None:
        """The index node that ends where the sequence's computed tokens end."""
        size = self.config.page_tokens
        number, rest = divmod(sequence.confirmed, size)
        if sequence.trail is None or sequence.registered != number or rest == 0:
            return sequence.trail if sequence.registered == number else None
        tokens = tuple(sequence.tokens[number * size : sequence.confirmed])
        pages = self._pages_at(sequence, number)
        return self.index.insert(sequence.trail, chain(sequence.trail.key, tokens), tokens, pages)

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
        sequence.tokens.append(drawn.token)
        self.counters.generated_tokens += 1
        if sequence in self.running:
            self._register(sequence)
        try:
            reason = self._reason_to_end(sequence, drawn.token)
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
        if len(sequence.tokens) >= self.config.max_context:
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
        if sequence in self.running:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
        self.counters.finished[reason.value] += 1
        self._outbox.append(_output(sequence, drawn, reason, failure))

    def _vacate(self, sequence: Sequence) -> None:
        """A running sequence gives back its pages; what it computed stays for others to reuse."""
        self.running.remove(sequence)
        self._computed_all(sequence)
        self._register_tail(sequence)
        for table in sequence.tables:
            self.ledger.release_all(table)
        self.ledger.release_all(sequence.opens.values())
        sequence.tables = []
        sequence.page_ids.clear()
        sequence.opens = {}
        sequence.trail = None
        sequence.registered = 0

    def _register_tail(self, sequence: Sequence) -> None:
        """Registers what lies beyond the last full page, and the recurrent state itself."""
        partial = sequence.confirmed % self.config.page_tokens
        if not self.config.prefix_cache or (partial and sequence.format.seals):
            return
        node = self._tail_node(sequence)
        if node is None or node.parent is None or sequence.computed > len(sequence.tokens):
            return
        offset = (sequence.computed - 1) % self.config.page_tokens + 1
        for group in self.groups:
            if isinstance(group.spec, RecurrentState):
                state = sequence.tables[group.index][0]
                assert state is not None, "a state slot is never given back early"
                self.index.insert_snapshot(node, offset, state)


def _share(budget: int, wants: list[int]) -> list[int]:
    """Splits a budget among prompts, oldest first: half by age, the rest by shortness."""
    shares = [0] * len(wants)
    left = budget
    if len(wants) > 1:
        shares[0] = min(wants[0], budget - budget // 2)
        left -= shares[0]
    for number in sorted(range(len(wants)), key=lambda n: (wants[n], n)):
        extra = min(wants[number] - shares[number], left)
        shares[number] += extra
        left -= extra
    return shares


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
