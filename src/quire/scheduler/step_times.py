"""Step times by rows and keys: measured at warm-up, and updated by every step that runs."""

from __future__ import annotations

from bisect import bisect, bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import ceil, inf

_REMEMBERED = 5
"""Number of recent steps kept for each range of rows."""
_CERTAIN = 3
"""Fewest steps of a range that bound the times of other ranges: one may be an outlier."""
_KEPT = 4
"""Number of steps of known ranges for which a curve that every step asks for is kept."""
_GROWTH = 2
"""Step times are known up to this multiple of the most rows seen."""
_ALIKE = 32
"""Two steps have about as many rows if these differ by at most this part."""
_FARTHER = 4
"""Two steps show the time of keys if their keys differ by at least this part of the greater."""
_COMPARED, _LEAST_COMPARED = 31, 3
"""Most pairs of steps from which the time of a key is computed, and the fewest."""
_LEAST_WITHOUT_KEYS = 0.2
"""Least part of a step's time that does not go to its keys."""
_SLOWER = 2.0
"""A row takes at most this multiple of its time in steps of fewer rows."""


class StepTimes:
    """A table of step times by number of rows, and the time of a key.

    The ranges of rows are 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16 and so on. A range has one point from
    its last five steps: their mean rows, times their median seconds per row. The median ignores
    single slow steps, such as one that loads a kernel.

    A size that once seemed slow, say while the machine was busy, may never be planned again. So the
    newest steps also correct the points of other sizes.

    Rows of prompts take longer the more keys are before their chunk. `keys` is the sum of these
    keys over the rows of prompts. A key takes the same time for all of them, whatever their number:
    the median of what pairs of steps with about as many rows and different keys show.

    Args:
        counted: returns how many rows a step of so many rows counts as, at least as many. Where
            graphs compute more rows than a step has, these are the graph's. None if every step
            counts as its own rows.
    """

    def __init__(self, counted: Callable[[int], int] | None = None) -> None:
        self._counted = counted
        self._steps: dict[int, deque[tuple[int, float]]] = {}
        """Rows, and seconds per row, of the last steps, by the upper end of their range."""
        self._own: dict[int, tuple[float, float]] = {}
        """Rows and seconds of each range's point, by its upper end; the last observed range last.
        """
        self._with_keys: dict[int, deque[tuple[int, int, float]]] = {}
        """Rows, keys and seconds of the last steps that read prompts, by the end of their range."""
        self._shown: deque[tuple[float, int]] = deque(maxlen=_COMPARED)
        """Seconds of a key that pairs of steps show, and their differences in keys."""
        self._key_s = 0.0
        self._ends: list[int] = []
        """The upper ends of all ranges, ascending."""
        self._ordered: list[tuple[float, float]] = []
        """The points as a curve, in the order of `_ends`: rows and seconds both ascend."""
        self._stale = 0
        """The greatest range whose point on the curve is out of date, and with it those of fewer
        rows; 0 if none is.
        """
        self._curve: list[float] = []
        """Seconds of steps of 0, 1, 2 and more rows, as far as they were asked for; empty where it
        has to be made again.
        """
        self._curve_used = False
        """Whether the curve was asked for since the last step was observed."""
        self._curve_in_use = False
        """Whether it was asked for before that, too."""
        self._unread = 0
        """Number of steps that the curve does not know."""
        self.largest = 0
        """The row count of the largest point; 0 if no step was seen."""
        self._largest_end = 0
        """The upper end of that point's range."""

    def observe(self, rows: int, seconds: float, keys: int | None = None) -> None:
        """Record the time of a step.

        Args:
            keys: of the rows of prompts; None if there are none.
        """
        rows = rows if self._counted is None else self._counted(rows)
        end = _range(rows)
        if keys is not None:
            self._compare(end, (rows, keys, seconds))
            own_s = _LEAST_WITHOUT_KEYS * seconds
            if self._key_s * keys > seconds - own_s:
                self._key_s = (seconds - own_s) / keys
            seconds -= self._key_s * keys
        steps = self._steps.setdefault(end, deque(maxlen=_REMEMBERED))
        steps.append((rows, seconds / rows))
        if not (known := self._own.pop(end, None) is not None):
            place = bisect(self._ends, end)
            self._ends.insert(place, end)
            self._ordered.insert(place, (rows, seconds))
        mean = sum([rows for rows, _ in steps]) / len(steps)
        row_s = sorted([row_s for _, row_s in steps])
        self._own[end] = mean, mean * row_s[(len(row_s) - 1) // 2]  # the median, or below
        if end >= self._largest_end:
            self._largest_end, self.largest = end, int(mean)
        self._stale = max(self._stale, end)
        if len(steps) >= _CERTAIN:
            self._correct_others(end)
        self._unread += 1
        in_use = self._curve_used and self._curve_in_use
        self._curve_in_use, self._curve_used = self._curve_used, False
        if not in_use:
            self._curve = []
        elif not known or self._unread >= _KEPT:
            # Made here: when it is asked for, the device may wait for the plan.
            self._curve = self._line(len(self._curve))

    def _correct_others(self, end: int) -> None:
        """Correct points of other ranges that contradict all newer steps of this range: more rows
        take no less time, and at most `_SLOWER` times as long a row.
        """
        newest = [row_s for _, row_s in self._steps[end]]
        least_row_s, most_row_s = min(newest), _SLOWER * max(newest)
        least_s = least_row_s * self._own[end][0]
        place = bisect(self._ends, end)
        for larger in self._ends[place:]:
            rows, seconds = self._own[larger]
            if least_s <= seconds <= most_row_s * rows:
                break
            self._correct(larger, min(max(seconds, least_s), most_row_s * rows))
        for smaller in reversed(self._ends[: place - 1]):
            rows, seconds = self._own[smaller]
            if _SLOWER * seconds >= least_row_s * rows:
                break
            self._correct(smaller, least_row_s * rows / _SLOWER)

    def _correct(self, end: int, seconds: float) -> None:
        """Replace the steps of a range by one of so many seconds."""
        rows, _ = self._own[end]
        self._own[end] = rows, seconds
        self._steps[end] = deque([(int(rows), seconds / rows)], maxlen=_REMEMBERED)
        self._stale = max(self._stale, end)

    def _compare(self, end: int, step: tuple[int, int, float]) -> None:
        """Compare a step with one of about as many rows whose keys differ most from its own."""
        before = self._with_keys.setdefault(end, deque(maxlen=_REMEMBERED))
        rows, keys, seconds = step
        alike = [(abs(k - keys), k, s) for n, k, s in before if _ALIKE * abs(n - rows) <= rows]
        before.append(step)
        apart, other, other_s = max(alike, default=(0, keys, seconds))
        if _FARTHER * apart <= max(keys, other):
            return
        self._shown.append(((seconds - other_s) / (keys - other), apart))
        if len(self._shown) >= _LEAST_COMPARED:
            self._key_s = max(0.0, _weighted_median(self._shown))

    def _points(self) -> list[tuple[float, float]]:
        """Return the points of all ranges as a curve: rows and seconds both ascend.

        A step changes the points of its range and of fewer rows alone. So the question that follows
        every small step computes few.
        """
        if self._stale:
            place = bisect(self._ends, self._stale)
            most = self._ordered[place][1] if place < len(self._ends) else inf
            for at in range(place - 1, -1, -1):
                mean, own = self._own[self._ends[at]]
                most = min(most, own)  # fewer rows never take longer
                self._ordered[at] = mean, most
            self._stale = 0
        return self._ordered

    def _newest(self) -> list[tuple[float, float]]:
        """Return the points as an ascending curve, in which newer points correct older ones.

        A range with fewer than `_CERTAIN` steps corrects no range with more. Its point is left out
        if it lies below one of fewer rows, and lowered if it lies above one of more rows.
        """
        certain = [end for end in self._own if len(self._steps[end]) >= _CERTAIN]
        others = sorted(end for end in self._own if len(self._steps[end]) < _CERTAIN)
        rows: list[float] = []
        seconds: list[float] = []
        for end in reversed(others + certain):
            mean, own = self._own[end]
            place = bisect(rows, mean)
            if place and own < seconds[place - 1]:
                if len(self._steps[end]) < _CERTAIN:
                    continue
                own = seconds[place - 1]
            if place < len(rows):
                own = min(own, seconds[place])
            rows.insert(place, mean)
            seconds.insert(place, own)
        return list(zip(rows, seconds, strict=True))

    def seconds(self, rows: int, keys: int = 0) -> float | None:
        """Return the time of a step of `rows` rows; None before any step was seen.

        Times between two points, and below the first, lie on a line through two points. Above the
        last they grow with the rows. With a single point, fewer rows take as long.
        """
        points = self._points() if self._stale else self._ordered
        if not points:
            return None
        rows = rows if self._counted is None else self._counted(rows)
        keys_s = self._key_s * keys
        last, last_s = points[-1]
        if rows >= last or len(points) == 1:
            return last_s * max(1.0, rows / last) + keys_s
        place = max(1, bisect_right(points, (rows, inf)))
        (low, low_s), (high, high_s) = points[place - 1], points[place]
        line = low_s + (high_s - low_s) * (rows - low) / (high - low)
        return max(line, low_s * min(1.0, rows / low)) + keys_s

    def curve(self, first: int, last: int) -> list[float] | None:
        """Return the times of each number of rows from `first` to `last`, by the newest steps.

        Where steps of fewer rows take longer than more rows did before, these take at least as long
        now: the machine has become slower, or other tokens take longer.
        """
        if not self._own:
            return None
        if len(self._curve) <= last:
            self._curve = self._line(_GROWTH * last + 1)
        self._curve_used = True
        return self._curve[first : last + 1]

    def _line(self, count: int) -> list[float]:
        """Return the seconds of 0, 1, 2 and more rows, `count` numbers in all.

        By lists: calls of NumPy take longer for so few numbers.
        """
        self._unread = 0
        points = self._newest()
        (first, first_s), (last, last_s) = points[0], points[-1]
        if len(points) == 1:
            return [last_s * max(1.0, rows / last) for rows in range(count)]
        slope = (points[1][1] - first_s) / (points[1][0] - first)
        line = [
            max(first_s + slope * (rows - first), first_s * rows / first)
            for rows in range(min(count, ceil(first)))
        ]
        for (low, low_s), (high, high_s) in pairwise(points):
            slope = (high_s - low_s) / (high - low)
            line += [
                low_s + slope * (rows - low) for rows in range(len(line), min(count, ceil(high)))
            ]
        return line + [last_s * rows / last for rows in range(len(line), count)]

    def known_seconds(self, rows: int, keys: int = 0) -> float | None:
        """Return the time of a step of `rows` rows; None if only much smaller steps were seen."""
        return self.seconds(rows, keys) if rows <= _GROWTH * self.largest else None

    def rows_within(self, seconds: float, context: int = 0) -> int:
        """Return the most rows whose step takes at most `seconds`, each behind `context` keys; 0 if
        none does. There are at most as many as steps have whose times are known.
        """
        least, most = 0, _GROWTH * self.largest
        key_s = self._key_s * context
        for slower, own_s in self._points():
            if own_s + key_s * slower > seconds:
                most = min(most, ceil(slower) - 1)
                break
        while least < most:
            rows = (least + most + 1) // 2
            if (self.seconds(rows, rows * context) or 0.0) <= seconds:
                least = rows
            else:
                most = rows - 1
        return least

    def worthwhile_rows(self, least: int, seconds: float, rate: float, context: int = 0) -> int:
        """Return `least` rows, or the fewest above them that are computed at `rate` times the
        highest rate within `seconds`. Only sizes that were seen count.

        Args:
            context: keys before the rows.
        """
        key_s = self._key_s * context
        row_s = [
            (rows, own_s / rows + key_s)
            for rows, own_s in self._points()
            if own_s + key_s * rows <= seconds
        ]
        most_s = min([each for _, each in row_s], default=0.0) / rate
        enough = [int(rows) for rows, each in row_s if each <= most_s]
        return max(least, min(enough, default=0))


class ShortTimes:
    """Times of a part of a step, by number of rows or sequences.

    Numbers from one power of two to the next share their times. The second shortest of the last
    five counts: some are much longer, such as those in which a kernel is loaded or a CUDA graph is
    recorded. A time that is too short is corrected by the next ones, while a part that seems too
    long is left out, and its time is not measured again.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._expected: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> None:
        recent = self._recent.setdefault(rows.bit_length(), deque(maxlen=_REMEMBERED))
        recent.append(seconds)
        self._expected[rows.bit_length()] = sorted(recent)[len(recent) // 4]

    def seconds(self, rows: int) -> float:
        """Return the expected time; that of fewer rows, else of more, where none was measured."""
        size = rows.bit_length()
        if (known := self._expected.get(size)) is not None:
            return known
        nearest = min(self._expected, key=lambda each: (each > size, abs(each - size)), default=0)
        return self._expected.get(nearest, 0.0)

    def shorten(self, rows: int, factor: float) -> None:
        """Multiply the expected time, so that a part that is left out is tried again."""
        if rows.bit_length() in self._expected:
            self._expected[rows.bit_length()] *= factor


def _weighted_median(values: Iterable[tuple[float, int]]) -> float:
    """Return the weighted median of pairs of a value and its weight."""
    ordered = sorted(values)
    half = sum([weight for _, weight in ordered]) / 2
    for value, weight in ordered:
        half -= weight
        if half <= 0:
            return value
    raise ValueError("no values")


def _range(rows: int) -> int:
    """Return the largest number of the range that contains `rows`; see `StepTimes`."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power
