"""Deadlines of requests. A query's cost grows with the number of passed deadlines, not of all."""

from __future__ import annotations

import heapq


class Deadlines:
    """Deadlines of sequences, by sequence number."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        """Heap of deadlines. Dropped entries are removed at the top, or once they are the
        majority.
        """

    def set(self, number: int, time: float) -> None:
        """Set the deadline of a sequence that has none."""
        self._times[number] = time
        heapq.heappush(self._heap, (time, number))

    def drop(self, number: int) -> None:
        """Drop a sequence's deadline, if it has one."""
        self._times.pop(number, None)
        if len(self._heap) > 2 * len(self._times) + 16:
            self._heap = [(time, number) for number, time in self._times.items()]
            heapq.heapify(self._heap)

    def take_passed(self, now: float) -> list[int]:
        """Remove and return the sequences whose deadline has passed, earliest first."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            _, number = heapq.heappop(self._heap)
            if self._times.pop(number, None) is not None:
                passed.append(number)
        return passed

    def __len__(self) -> int:
        """Return how many entries are stored, including those of dropped sequences."""
        return len(self._heap)
