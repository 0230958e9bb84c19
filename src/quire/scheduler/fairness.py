"""The order of sequences: priorities first, then fair shares of API keys, then arrival.

A *key* here is an API key. Two resources are shared. Places among running sequences are divided
equally among keys with requests, weighted by `share`. Rows of prompts go first to the key with the
lowest use so far (`core.turns`). A positive `priority` puts a request behind those of every key. A
negative one puts it before others of its own key only, so that no client can overtake another key.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from quire.core.turns import Shares
from quire.scheduler.rows import PlannedRows
from quire.scheduler.sequence import Sequence


class WaitingQueue:
    """Sequences that hold no blocks, ordered within each key by priority and arrival."""

    def __init__(self) -> None:
        self._of: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._of.values())

    @property
    def callers(self) -> Iterable[str]:
        """Return the keys with waiting sequences."""
        return self._of.keys()

    def add(self, sequence: Sequence) -> None:
        """Add a new or preempted sequence."""
        insort(self._of.setdefault(sequence.request.caller, []), sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence."""
        caller = sequence.request.caller
        queue = self._of[caller]
        del queue[bisect_left(queue, _rank(sequence), key=_rank)]
        if not queue:
            del self._of[caller]

    def heads(self, passed: Mapping[str, int]) -> list[Sequence]:
        """Return the next sequence of each key, after skipping as many as were passed over."""
        return [
            queue[index]
            for caller, queue in self._of.items()
            if (index := passed.get(caller, 0)) < len(queue)
        ]


class Fairness:
    """Each key's use and number of running sequences. Pure Python, owned by the planner."""

    def __init__(self) -> None:
        self._shares: Shares[str] = Shares()
        self._running: Counter[tuple[int, str]] = Counter()

    def start_plan(self, running: Iterable[Sequence], waiting: WaitingQueue) -> None:
        """Update which keys have requests, at the start of a plan."""
        callers = dict.fromkeys([each.request.caller for each in running])
        self._shares.ordered(chain(callers, waiting.callers))

    def started(self, sequence: Sequence) -> None:
        """Count a sequence that starts to run."""
        self._running[_place(sequence)] += 1

    def stopped(self, sequence: Sequence) -> None:
        """Count a sequence that stops running."""
        self._running[_place(sequence)] -= 1

    def charge(self, rows: Iterable[PlannedRows]) -> None:
        """Add a step's rows to the use of their keys."""
        used: dict[str, float] = {}
        for each in rows:
            request = each.sequence.request
            used[request.caller] = used.get(request.caller, 0.0) + each.count / request.share
        for caller, amount in used.items():
            self._shares.charge(caller, amount)

    def next(self, waiting: WaitingQueue, passed: Mapping[str, int]) -> Sequence | None:
        """Return the sequence to admit next; None if all were passed over."""
        heads = waiting.heads(passed)
        if len(heads) < 2:
            return heads[0] if heads else None
        return min(heads, key=lambda each: (each.level, self._load(each), *self._turn(each)))

    def ordered(self, prompts: list[Sequence]) -> list[Sequence]:
        """Return the sequences that read prompts, in the order in which they get rows."""
        return sorted(prompts, key=lambda each: (each.level, *self._turn(each)))

    def first_to_yield(self, running: list[Sequence]) -> Sequence:
        """Return the running sequence to preempt first if blocks run out."""
        return max(running, key=lambda each: (each.level, self._load(each), *_rank(each)))

    def displaced_by(self, sequence: Sequence, running: list[Sequence]) -> Sequence | None:
        """Return the running sequence whose place a waiting one takes, if any.

        The running one has a lower priority, or its key runs more sequences by so much that
        swapping does not make the difference larger the other way; so the two never swap back.
        """
        request = sequence.request
        lower = [
            each
            for each in running
            if each.level > sequence.level
            or (each.request.caller == request.caller and each.request.priority > request.priority)
        ]
        if lower:
            return max(lower, key=lambda each: (each.level, *_rank(each)))
        load = self._load(sequence, 1)
        over = [
            each
            for each in running
            if each.level == sequence.level
            and each.request.caller != request.caller
            and self._load(each, -1) >= load
        ]
        return self.first_to_yield(over) if over else None

    def _load(self, sequence: Sequence, more: int = 0) -> float:
        """Return the number of running sequences of a key plus `more`, divided by its share."""
        return (self._running[_place(sequence)] + more) / sequence.request.share

    def _turn(self, sequence: Sequence) -> tuple[float, int, int]:
        return self._shares.used(sequence.request.caller), *_rank(sequence)


def _rank(sequence: Sequence) -> tuple[int, int]:
    """Return the sort key of a sequence within its API key."""
    return sequence.request.priority, sequence.number


def _place(sequence: Sequence) -> tuple[int, str]:
    return sequence.level, sequence.request.caller
