"""Decides which sequences run and which wait: admission, fair shares, and preemption."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from quire.cache.block_manager import BlockManager
from quire.cache.reuse import Match, MissKind
from quire.core.figures import size
from quire.core.request import Failure
from quire.scheduler.block_tables import BlockTables
from quire.scheduler.counters import Counters
from quire.scheduler.fairness import Fairness, WaitingQueue
from quire.scheduler.prefix_sharing import PrefixSharing
from quire.scheduler.rows import PlannedRows
from quire.scheduler.sequence import Sequence, Status

_MAX_LOOKUP_TOKENS = 1 << 17
"""Prompt tokens looked up in the prefix index for one step, about 5 ms; other prompts wait."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Attributes:
        max_context: the most tokens of a sequence, prompt and answer together.
        snapshot_every: tokens between two recurrent snapshots of a prompt.
        whole_prompts: whether a step reads prompts whole, because their tokens see those after them
            and nothing is kept.
    """

    block_size: int
    max_sequences: int
    max_context: int
    prefix_cache: bool = True
    snapshot_every: int = 2048
    whole_prompts: bool = False


class Admission:
    """Owner of the queues of running and waiting sequences.

    Args:
        fail: ends a request that can never get room.
        clock: returns seconds, on the clock of arrival times.

    Attributes:
        running: oldest first.
        admitted: sequences that the current plan admits.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        manager: BlockManager,
        sharing: PrefixSharing,
        tables: BlockTables,
        counters: Counters,
        fail: Callable[[Sequence, Failure], None],
        clock: Callable[[], float],
    ) -> None:
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue()
        self.fairness = Fairness()
        self.admitted: list[Sequence] = []
        self._config = config
        self._manager = manager
        self._sharing = sharing
        self._tables = tables
        self._counters = counters
        self._fail = fail
        self._clock = clock
        self._no_room: tuple[int, int] | None = None
        """Number of the last sequence without room, and the release count at that time. It is tried
        again after a further release.
        """

    def start_plan(self) -> None:
        """Start a plan. If all places are taken, a waiting sequence of higher rank may take one."""
        self.admitted = []
        self.fairness.start_plan(self.running, self.waiting)
        self._change_places()

    def forget(self) -> None:
        """Forget which sequences lacked room, because no block is held any more."""
        self._no_room = None

    def vacate(self, sequence: Sequence) -> None:
        """Release a running sequence's blocks. Computed blocks stay reusable."""
        sequence.status = Status.WAITING
        self.running.remove(sequence)
        self.fairness.stopped(sequence)
        self._sharing.end(sequence)
        self._tables.release(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Put a running sequence back into the queue. Evicted tokens are computed again."""
        self.vacate(sequence)
        sequence.progress.computed = 0
        self.waiting.add(sequence)

    def _change_places(self) -> None:
        """If all places are taken, preempt one sequence for a waiting one of higher rank."""
        if len(self.running) < self._config.max_sequences:
            return
        passed: Counter[str] = Counter()
        while (sequence := self.fairness.next(self.waiting, passed)) is not None:
            if self._may_start(sequence):
                last = self.fairness.displaced_by(sequence, self.running)
                if last is not None:
                    self._preempt(last, [])
                return
            passed[sequence.request.caller] += 1

    def _may_start(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence lacks nothing but a place and blocks."""
        return not sequence.progress.pending and not self._sharing.must_wait(sequence)

    def admit(self, prompts: list[Sequence], plan: list[PlannedRows], budget: int) -> None:
        """Move waiting sequences to `prompts`, in fair order, while memory allows."""
        passed: Counter[str] = Counter()
        looked_up = 0
        places = self._config.max_sequences
        while self.waiting and len(self.running) < places and len(prompts) < max(1, budget):
            sequence = self.fairness.next(self.waiting, passed)
            if sequence is None:
                break
            if not self._may_start(sequence):
                passed[sequence.request.caller] += 1
                continue
            if looked_up > _MAX_LOOKUP_TOKENS:
                break
            if (sequence.number, self._manager.releases) == self._no_room:
                break
            looked_up += len(sequence.progress.tokens)
            match = self._sharing.match(sequence)
            if match is None:
                passed[sequence.request.caller] += 1
                continue
            if not self._tables.admit(sequence, match):
                if not self._lacks_room(sequence, plan):
                    break
                prompts[:] = [each for each in prompts if each.status is Status.RUNNING]
                continue
            self._start(sequence, match)
            prompts.append(sequence)

    def _lacks_room(self, sequence: Sequence, plan: list[PlannedRows]) -> bool:
        """Make room for a waiting sequence by priority or share. False if it has to wait."""
        last = self.fairness.displaced_by(sequence, self.running)
        if last is not None:
            self._preempt(last, plan)
        elif self.running:
            self._no_room = sequence.number, self._manager.releases
            return False
        else:
            self._yield_room(sequence)
        return True

    def _start(self, sequence: Sequence, match: Match) -> None:
        """Start a waiting sequence after the prefix that it reuses."""
        self.waiting.remove(sequence)
        sequence.progress.computed = match.length
        if self._sharing.start(sequence, match, self.running):
            sequence.queued_s = self._clock() - sequence.arrived
            self._counters.add_start(sequence)
        sequence.status = Status.RUNNING
        self.admitted.append(sequence)
        self.fairness.started(sequence)
        insort(self.running, sequence, key=attrgetter("number"))

    def make_room(self, rows: PlannedRows, plan: list[PlannedRows]) -> bool:
        """Allocate blocks for rows, preempting the sequences last in order if needed.

        Return False if the sequence itself was preempted, being last.
        """
        sequence = rows.sequence
        while not self._tables.extend(sequence, rows.end):
            if self._tables.drop_spares(sequence):
                continue  # rows with drafts have their blocks already
            last = self.fairness.first_to_yield(self.running)
            if len(self.running) == 1 and last is sequence and not self._yield_room(last):
                return False
            self._preempt(last, plan)
            if last is sequence:
                return False
        return True

    def _yield_room(self, sequence: Sequence) -> bool:
        """Release the reused blocks of a lone sequence without room; it will reuse nothing.

        Return False if it reuses nothing already: it can never run, and its request has failed.
        """
        if not sequence.prefix.ignored:
            self._sharing.ignore(sequence, MissKind.EVICTED)
            return True
        budget = size(self._manager.capacity.budget)
        message = f"the server's KV cache, {budget}, cannot hold this request alone"
        self._fail(sequence, Failure(message, 500))
        return False

    def _preempt(self, sequence: Sequence, plan: list[PlannedRows]) -> None:
        """Preempt a sequence: release its blocks, and put it back into the queue."""
        self._counters.preemptions += 1
        plan[:] = [rows for rows in plan if rows.sequence is not sequence]
        if self._tables.drop_copies(sequence):
            # It started in this plan, and what it was to copy never came.
            sequence.progress.computed = 0
        self.requeue(sequence)
