"""Order between sequences: priorities first, then fair shares of API keys, then arrival.

A *key* here is an API key. Two things are shared out: places among the running sequences, of which
each key with requests gets an equal number (times its `share`), and rows of prompts, of which the
key with the lowest use so far goes first (`core.turns`). A positive `priority` puts a request
behind those of every key; a negative one puts it before others of its own key only, so that no
client can push itself before another key.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from quire.core.turns import Shares
from quire.scheduler.sequence import Sequence


class WaitingQueue:
    """The sequences that hold no blocks, those of each key by priority and arrival."""

    def __init__(self) -> None:
        self._of: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._of.values())

    @property
    def callers(self) -> Iterable[str]:
        """The keys with sequences that wait."""
        return self._of.keys()

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait: new, or preempted."""
        insort(self._of.setdefault(sequence.request.caller, []), sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that waits."""
        caller = sequence.request.caller
        queue = self._of[caller]
        del queue[bisect_left(queue, _rank(sequence), key=_rank)]
        if not queue:
            del self._of[caller]

    def heads(self, passed: Mapping[str, int]) -> list[Sequence]:
        """Return the next sequence of each key, behind as many as were passed over."""
        queues = ((queue, passed.get(caller, 0)) for caller, queue in self._of.items())
        return [queue[index] for queue, index in queues if index < len(queue)]


class Fairness:
    """The use of each key, and how many sequences of it run. Pure Python, owned by the planner."""

    def __init__(self) -> None:
        self._shares: Shares[str] = Shares()
        self._running: Counter[tuple[int, str]] = Counter()

    def begin(self, running: Iterable[Sequence], waiting: WaitingQueue) -> None:
        """Note the keys that have requests when a step is planned."""
        self._shares.ordered(chain((each.request.caller for each in running), waiting.callers))

    def started(self, sequence: Sequence) -> None:
        """Count a sequence that runs from now on."""
        self._running[_place(sequence)] += 1

    def stopped(self, sequence: Sequence) -> None:
        """Count a sequence that runs no longer."""
        self._running[_place(sequence)] -= 1

    def charge(self, sequence: Sequence, rows: int) -> None:
        """Add rows of a step to the use of a sequence's key."""
        self._shares.charge(sequence.request.caller, rows / sequence.request.share)

    def next(self, waiting: WaitingQueue, passed: Mapping[str, int]) -> Sequence | None:
        """Return the sequence to admit next; None if all were passed over."""
        heads = waiting.heads(passed)
        if len(heads) < 2:
            return heads[0] if heads else None
        return min(heads, key=lambda each: (each.level, self._load(each), *self._turn(each)))

    def ordered(self, prompts: list[Sequence]) -> list[Sequence]:
        """Return sequences that read, in the order in which rows are theirs."""
        return sorted(prompts, key=lambda each: (each.level, *self._turn(each)))

    def first_to_yield(self, running: list[Sequence]) -> Sequence:
        """Return the running sequence that is preempted if blocks run out."""
        return max(running, key=lambda each: (each.level, self._load(each), *_rank(each)))

    def displaced_by(self, sequence: Sequence, running: list[Sequence]) -> Sequence | None:
        """Return the running sequence that a waiting one takes the place of, if any.

        It has a lower priority, or its key runs so many more that the two keys are no further
        apart when they have changed places: so they never change back.
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
        """Return how many sequences of a key run, `more` included, by its share."""
        return (self._running[_place(sequence)] + more) / sequence.request.share

    def _turn(self, sequence: Sequence) -> tuple[float, int, int]:
        return self._shares.used(sequence.request.caller), *_rank(sequence)


def _rank(sequence: Sequence) -> tuple[int, int]:
    """Return the order among sequences of one key."""
    return sequence.request.priority, sequence.number


def _place(sequence: Sequence) -> tuple[int, str]:
    return sequence.level, sequence.request.caller
