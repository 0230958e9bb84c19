"""Decides how many prompt tokens a step reads, so that running streams do not stall.

The rule. Every step that generates grants prompts an allowance: `stall_factor - 1` times what the
step takes without them, once for each prompt that waits beyond the first. Short steps grant what
they lack of 4 ms, if that is more: nobody sees that a stream pauses so briefly. A step reads as
many tokens as fit into the allowance and into `step_s`. If a few tokens take nearly as long as
many, because launching such a step or reading all experts has a fixed cost, it reads so many that
they are worth it. Where nobody generates, `step_s` counts, or twice as long if that reads faster.

A graph takes its time whether it is full or not. So a graphed step fills the next larger graph if
that takes at most twice `step_s`, and reads faster: on an H100, Llama 8B in bfloat16 reads 2,048
tokens in 52 ms, and 1,024 in 37. A few rows more than a graph has wait for the next step, if both
steps take less time than one of the larger graph.

An account holds the allowances to what steps really took. While it is overdrawn, steps only
generate until their allowances have paid for it; a few allowances may be saved. Where many prompts
wait, the allowances of all but one may pay at once, and the step reads for what they leave.

How long steps take is looked up in tables (`MeasuredSteps`). These know rows and keys: a row of a
prompt takes longer the more keys are before its chunk, whatever the size of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from quire.scheduler.measured_steps import MeasuredSteps

_SHORT_S = 0.004
"""Seconds that a step beside streams may take, however short it is without prompts."""
_LEAST_S = 1e-6
"""Lower bound of the seconds that rows add to a step, which a rate divides by."""
_FIRST_TOKENS = 32
"""Prompt tokens of a step before any was measured, and the minimum without streams: so few rows
take about as long as one, because all weights are read."""
_WORTH, _LEAST_WORTH = 5, 2
"""Least ratio of a step's prompt time to its fixed cost. The second value applies beside streams,
if the first would make the step longer than `step_s`.
"""
_READS_IN_A_ROW = 16
"""Most consecutive steps that read prompts beside streams; then one step only generates, to measure
how long that takes.
"""
_MAX_OVERRUN = 4
"""Outlier limit: a step is charged at most this multiple of its expected time."""
_SAVED = 4
"""Most allowances that quick steps can save up for slow ones."""
_LEAST_ADDED = 0.1
"""Least fraction of a step's time that is charged to its prompts."""
_UNSEEN = 2
"""Most steps in flight whose times are not known yet."""
_LEAST_GRAPHED = 8
"""Fewest rows that a CUDA graph must have left for prompts."""
_MANY_ROWS = 1024
"""Fewest rows of a graphed step that fill a graph, unless no more prompt tokens wait."""
_WORTH_RATE = 0.8
"""Steps read prompts at least at this fraction of the highest rate within their time.

Streams are as fast as with smaller steps, but pause for longer: Llama 8B on an H100 reads 20,000
tokens beside 8 streams in 0.75 s instead of 1.2 with 0.5 (simulated), in steps of up to 21 ms.
"""
_LONGER = 2.0
"""A step that fills a larger graph, or an eager one alone, may take this multiple of `step_s`."""
_FASTER = 1.05
"""Least ratio of the rates at which a larger graph and a smaller one read."""
_GROWN = 2
"""A graph is tried before it was measured if it has this multiple of the rows of one that was."""
_GRAPHED_STEPS = 4
"""Assumed ratio of the times of the largest eager step and of a graphed one, before both are
measured: 35 to 45 ms and 8 ms with 64 rows (Gemma 4 26B-A4B in 4 bits on an H200).
"""


class _Expected(NamedTuple):
    """A planned step whose duration is not known yet.

    Attributes:
        shape: generating rows, chunks and prompt rows.
        seconds: seconds that its prompts are expected to add.
    """

    shape: tuple[int, int, int]
    seconds: float


class _Account:
    """Prompt time beyond the allowances, in seconds; negative if allowances are saved.

    Steps without waiting prompts pay in when somebody asks: nearly all steps are such, and an
    allowance takes a while.

    Args:
        allowance: returns that of a step, by its generating rows and the number of prompts.
    """

    def __init__(self, allowance: Callable[[int, int], float]) -> None:
        self._allowance = allowance
        self._owed_s = 0.0
        self._alone = self._alone_rows = 0
        """Number of steps that have not paid in, and generating rows of the last of them."""

    def clear(self) -> None:
        self._owed_s = 0.0
        self._alone = 0

    def note_alone(self, rows: int) -> None:
        """Note a step of so many generating rows for which no prompt waits."""
        self._alone, self._alone_rows = self._alone + 1, rows

    def owed_s(self) -> float:
        """Return the balance."""
        if self._alone:
            allowance = self._allowance(self._alone_rows, 0)
            steps, self._alone = self._alone, 0
            self.charge(0.0, allowance, steps=steps)
        return self._owed_s

    def charge(self, seconds: float, allowance: float, steps: int = 1) -> None:
        """Take so many seconds from the allowances of some steps."""
        self._owed_s = max(-_SAVED * allowance, self.owed_s() + seconds - steps * allowance)

    def correct(self, seconds: float) -> None:
        """Add what a step took beyond its charge."""
        self._owed_s += seconds


class PrefillBudget:
    """Sizes prompt chunks by time.

    Args:
        step_s: the most seconds for the prompts of a step; twice as many if they fill a larger
            graph, which reads faster.
        stall_factor: more than 1. While one or two prompts are read, steps that generate take on
            average this many times as long as they do without, or 4 ms. Each further waiting prompt
            adds as much again: clients that wait for a first token count as much as those that
            stream.
        max_rows: the most rows of a step.
        times: measured at warm-up; updated by every step that runs.
    """

    def __init__(
        self,
        step_s: float,
        stall_factor: float,
        max_rows: int,
        times: MeasuredSteps | None = None,
    ) -> None:
        self._step_s = step_s
        self._stall_factor = stall_factor
        self._max_rows = max_rows
        self.times = times or MeasuredSteps()
        self._account = _Account(self._allowance)
        self._expected: deque[_Expected] = deque(maxlen=_UNSEEN)
        self._reads_in_a_row = 0
        self._context = 0
        """Keys before the next chunk of the prompt that is read first."""

    # -- planning ------------------------------------------------------------------------------

    def room(self, decode_rows: int) -> int:
        """Return how many rows a step has left beside the generating ones."""
        return max(0, self._max_rows - decode_rows)

    def seconds(self, decode_rows: int, prompts: int = 1) -> float:
        """Return the time for prompts and their media in the next step.

        Args:
            decode_rows: generating rows of the step.
            prompts: number of waiting prompts, started or not.
        """
        if not decode_rows:
            return self._step_s
        return min(self._step_s, self._allowance(decode_rows, prompts))

    def prompt_budget(self, decode_rows: int, prompts: int = 1, *, context: int = 0) -> int:
        """Return how many prompt tokens the next step may read; for arguments see `seconds`.

        0 while the account is overdrawn, or to measure a step that only generates.

        Args:
            context: keys before the next chunk of the prompt that is read first. `graph_budget`
                takes all chunks of the step to have as many.
        """
        room, self._context = self.room(decode_rows), context
        if decode_rows and self._account.owed_s() > 0 and not self._pays(decode_rows, prompts):
            return 0
        known = self.times.generating.largest > 0
        if decode_rows and self._reads_in_a_row >= (_READS_IN_A_ROW if known else 1):
            return 0
        reading = self.times.prompts(decode_rows)
        if not reading.largest:
            return min(room, _FIRST_TOKENS)
        fixed_s = reading.seconds(1) or 0.0
        worth_s, most_s = _WORTH * fixed_s, _LONGER * self._step_s
        if decode_rows:
            most_s = self._step_s
            worth_s = min(worth_s, max(most_s, _LEAST_WORTH * fixed_s))
        seconds = self._granted(decode_rows, prompts, self._step_s)
        if prompts > 1:
            seconds -= fixed_s  # of a second chunk: the step reads the oldest and the shortest
        rows = reading.rows_within(max(seconds, worth_s), context)
        rows = reading.worthwhile_rows(rows, most_s, _WORTH_RATE, context=context)
        return min(room, max(1 if decode_rows else _FIRST_TOKENS, rows))

    def graph_budget(
        self, tokens: int, decode_rows: int, waiting: int, max_graph_rows: int, prompts: int = 1
    ) -> int:
        """Return how many prompt tokens the next step reads: as fit a CUDA graph, or `tokens`.

        A graphed step reads what fits into the time for prompts. Prompts are read by graphs if
        graphs need no more time for all that waits than eager steps. If no eager step was measured
        and one reads far more than a graph, this one has more tokens than a graph, so that it is.

        Args:
            tokens: tokens that an eager step may read.
            waiting: prompt tokens that can be read now.
            max_graph_rows: the most rows of a graphed step; 0 if the next step cannot be graphed.
            prompts: number of waiting prompts, started or not.
        """
        room = max_graph_rows - decode_rows
        if not tokens or not waiting or room < _LEAST_GRAPHED:
            return tokens
        rows = min(room, waiting, self._graph_rows(decode_rows, prompts))
        filling = _filling(decode_rows + rows) - decode_rows
        if _LEAST_GRAPHED <= filling < rows:
            ends_later = self._generating_s(decode_rows + rows) > (
                self._generating_s(decode_rows + filling)
                + self._generating_s(decode_rows + rows - filling)
            )
            rows = filling if rows < waiting or ends_later else rows
        steps, chunk = -(-waiting // rows), min(tokens, waiting)
        graph_s = self.times.generating.known_seconds(decode_rows + rows, rows * self._context)
        eager_s = self.times.prompts(decode_rows).known_seconds(chunk, chunk * self._context)
        if graph_s is None or eager_s is None:
            largest = min(waiting, self.room(decode_rows))  # of an eager step
            if largest <= _GRAPHED_STEPS * max_graph_rows:
                return rows
            return max(tokens, min(largest, 2 * max_graph_rows))
        alone_s = self._generating_s(decode_rows)
        fits = steps * graph_s <= -(-waiting // chunk) * (alone_s + eager_s)
        return rows if fits else tokens

    def _graph_rows(self, decode_rows: int, prompts: int) -> int:
        """Return how many prompt rows a graphed step reads: those that fit into the time for
        prompts, or so many that they are worth the step's fixed cost.
        """
        generating = self.times.generating
        if not generating.largest:
            return self._max_rows
        alone_s = self._generating_s(decode_rows)
        seconds = alone_s + self._granted(decode_rows, prompts, self._step_s)
        rows = max(_FIRST_TOKENS, generating.rows_within(seconds, self._context) - decode_rows)
        most_s = alone_s + self._granted(decode_rows, prompts, _LONGER * self._step_s)
        rows = self._larger(rows, decode_rows, most_s)
        return self._worthwhile_rows(rows, decode_rows) if decode_rows else rows

    def _larger(self, rows: int, decode_rows: int, most_s: float) -> int:
        """Return the prompt rows that fill the next larger graph; `rows` if it takes more than
        `most_s` seconds, or is known to read hardly faster.
        """
        times, graph = self.times.generating, 1 << (decode_rows + rows).bit_length()
        measured = 1 << (times.largest - 1).bit_length()
        larger, smaller = graph - decode_rows, _filling(decode_rows + rows) - decode_rows
        larger_s = times.seconds(graph, larger * self._context) or 0.0
        if graph > min(self._max_rows, _GROWN * measured) or larger_s > most_s:
            return rows
        rate = self._rate(decode_rows, max(_LEAST_GRAPHED, smaller))
        if graph <= measured and self._rate(decode_rows, larger) < _FASTER * rate:
            return rows
        return larger

    def _worthwhile_rows(self, least: int, decode_rows: int) -> int:
        """Return `least` prompt rows, or as many as fill a larger graph if fewer are read at less
        than `_WORTH_RATE` of the highest rate.
        """
        times = self.times.generating
        most_s = self._generating_s(decode_rows) + self._step_s
        most = min(times.largest, times.rows_within(most_s, self._context))
        graph = 1 << (decode_rows + least).bit_length()
        rates = {least: self._rate(decode_rows, least)}
        while graph <= most:
            rates[graph - decode_rows] = self._rate(decode_rows, graph - decode_rows)
            graph *= 2
        worth = _WORTH_RATE * max(rates.values())
        return next(rows for rows, rate in rates.items() if rate >= worth)

    def _rate(self, decode_rows: int, rows: int) -> float:
        """Return how many prompt tokens a graphed step reads in a second that they add to it."""
        return rows / max(_LEAST_S, self._added_s(decode_rows, rows, rows * self._context))

    def beside_encoders(self, tokens: int, spent_s: float) -> int:
        """Return how many of a step's prompt tokens fit beside encoder work; at least half.

        Args:
            spent_s: seconds that the encoders take.
        """
        if not spent_s:
            return tokens
        half = tokens // 2
        table = self.times.prompts(0)
        whole_s, half_s = table.seconds(tokens), table.seconds(max(1, half))
        if not whole_s or not half_s or whole_s <= half_s:
            return tokens
        return tokens - min(int(spent_s * (tokens - half) / (whole_s - half_s)), half)

    def charge(
        self,
        decode_rows: int,
        prompts: int,
        chunks: int,
        prompt_rows: int,
        *,
        keys: int = 0,
        graphed: bool = False,
    ) -> None:
        """Charge a planned step's prompts to the account.

        Args:
            keys: see `StepTimes`.
        """
        if not decode_rows:
            self._account.clear()
            return
        if not prompts:
            self._reads_in_a_row = 0
            self._account.note_alone(decode_rows)
            return
        alone = graphed or not prompt_rows  # or shows what that many rows take
        self._reads_in_a_row = 0 if alone else self._reads_in_a_row + 1
        added_s = 0.0
        if prompt_rows:
            added_s = self._added_s(decode_rows, prompt_rows, keys, graphed=graphed)
        if prompt_rows and not graphed:
            self._expected.append(_Expected((decode_rows, chunks, prompt_rows), added_s))
        self._account.charge(added_s, self._allowance(decode_rows, prompts))

    # -- what steps took -----------------------------------------------------------------------

    def observe(
        self,
        decode_rows: int,
        chunks: int,
        prompt_rows: int,
        seconds: float,
        *,
        keys: int = 0,
        graphed: bool = False,
    ) -> None:
        """Record a step's duration in the tables, and correct the charge of its prompts.

        Args:
            keys: see `StepTimes`.
        """
        self.times.sampled.observe(decode_rows)
        if prompt_rows == 0 or graphed:
            rows, read = decode_rows + prompt_rows, keys if prompt_rows else None
            self.times.generating.observe(rows, seconds, read)
            return
        shape = decode_rows, chunks, prompt_rows
        planned = next((each for each in self._expected if each.shape == shape), None)
        added_s, table = seconds, self.times.reading
        if decode_rows:
            added_s = max(seconds - self._generating_s(decode_rows), _LEAST_ADDED * seconds)
            table = self.times.reading_beside
        if planned is not None:
            self._expected.remove(planned)
            self._account.correct(min(added_s, _MAX_OVERRUN * planned.seconds) - planned.seconds)
        table.observe(prompt_rows, added_s, keys)

    def prompt_seconds(self, tokens: int) -> float | None:
        """Return the expected seconds to read a prompt; None before any was read."""
        table = self.times.prompts(0)
        return (table if table.largest else self.times.generating).seconds(tokens)

    def step_seconds(self, decode_rows: int, prompt_rows: int, keys: int) -> float:
        """Return a step's expected seconds; `step_s` before any was seen."""
        if not self.times.generating.largest:
            return self._step_s
        return self.known_seconds(decode_rows, prompt_rows, keys)

    def known_seconds(
        self, decode_rows: int, prompt_rows: int, keys: int, *, graphed: bool = False
    ) -> float:
        """Return a step's expected seconds; 0 if no such step was seen.

        Args:
            keys: see `StepTimes`.
        """
        if graphed and self.times.generating.largest:
            return self._generating_s(decode_rows + prompt_rows, keys)
        known = decode_rows and self.times.generating.largest
        seconds = self._generating_s(decode_rows) if known else 0.0
        if prompt_rows:
            seconds += self.times.prompts(decode_rows).seconds(prompt_rows, keys) or 0.0
        return seconds

    # -- within --------------------------------------------------------------------------------

    def _allowance(self, decode_rows: int, prompts: int) -> float:
        """Return the seconds for prompts in a step beside `decode_rows` generating rows."""
        generating_s = self._generating_s(decode_rows)
        share_s = max(1, prompts - 1) * (self._stall_factor - 1) * generating_s
        return max(share_s, _SHORT_S - generating_s)

    def _granted(self, decode_rows: int, prompts: int, most_s: float) -> float:
        """Return at most `most_s` seconds for prompts: beside generating rows, what an allowance
        leaves once it has paid what is owed.
        """
        if not decode_rows:
            return most_s
        return min(most_s, self._allowance(decode_rows, prompts) - max(0.0, self._account.owed_s()))

    def _pays(self, decode_rows: int, prompts: int) -> bool:
        """Return whether an allowance pays what is owed, and leaves that of one prompt."""
        one_s = self._allowance(decode_rows, 1)
        return self._allowance(decode_rows, prompts) - self._account.owed_s() >= one_s

    def _generating_s(self, rows: int, keys: int = 0) -> float:
        """Return the seconds of a step that only generates, or is graphed; a guess before any was
        seen, 0 for no rows.

        Steps larger than any seen count as the largest.
        """
        if not rows:
            return 0.0
        times = self.times.generating
        seconds = times.seconds(min(rows, times.largest), keys)
        return self._step_s / 4 if seconds is None else seconds

    def _added_s(
        self, decode_rows: int, prompt_rows: int, keys: int, *, graphed: bool = True
    ) -> float:
        """Return the seconds that prompt rows are expected to add to a generating step."""
        if not graphed:
            seconds = self.times.prompts(decode_rows).seconds(prompt_rows, keys)
            return self._step_s / 4 if seconds is None else seconds
        both_s = self._generating_s(decode_rows + prompt_rows, keys)
        return max(0.0, both_s - self._generating_s(decode_rows))


def _filling(rows: int) -> int:
    """Return at most `rows` rows: those of a whole graph, if they are many.

    Graphs have powers of two of rows. Products of 1,200 rows by the graph of 2,048 take as long as
    those of 2,048 where thread blocks come in waves.
    """
    return rows if rows < _MANY_ROWS else 1 << (rows.bit_length() - 1)
