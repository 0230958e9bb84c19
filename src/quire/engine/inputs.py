"""From a plan to the flat arrays of one step, and the face of the step that a model sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate, chain

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from quire.attention.backend import Scoring
from quire.attention.step import Attention, preferred_order
from quire.cache.states import Segment
from quire.core.kv_format import KVFormat
from quire.models.base import CrossRows, MediaRows, RecurrentSegment, Step
from quire.scheduler.plan import Positions, ScheduledSequence, StepPlan


class _Rows:
    """Rows as a model sees them; implements `models.base.Step`.

    Attributes:
        sequences: in the order of the rows.
        tokens, positions, media, cross: see `Step`; whoever makes this sets the first two.
    """

    tokens: mx.array
    positions: mx.array
    media: MediaRows | None = None
    cross: CrossRows | None = None

    def __init__(self, sequences: list[ScheduledSequence], attention: Attention) -> None:
        self.sequences = sequences
        self._attention = attention
        self._step = attention.step(sequences)
        self._starts = [0, *accumulate(each.count for each in sequences)]
        self._total = self._starts.pop()
        self._segments: dict[int, list[Segment]] = {}

    # -- what models call ----------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: mx.array | None = None,
        chosen_by: int | None = None,
    ) -> mx.array:
        """See `models.base.Step.attend`."""
        return self._step.attend(layer, q, k, v, Scoring(scale, softcap, sinks), chosen_by)

    def choose(self, layer: int, q: mx.array, k: mx.array, weights: mx.array, limit: int) -> None:
        """See `models.base.Step.choose`."""
        self._step.choose(layer, q, k, weights, limit)

    def recurrent(self, layer: int) -> list[RecurrentSegment]:
        """See `models.base.Step.recurrent`."""
        group = self._attention.layout.group[layer]
        if group not in self._segments:
            self._segments[group] = self._build_segments(group)
        return [
            Segment(s.n, s.t, s.rows, s.pool, layer, s.slots, s.fresh, s.targets)
            for s in self._segments[group]
        ]

    def only_wanted(self) -> tuple[Step, mx.array] | None:
        """See `models.base.Step.only_wanted`."""
        return None

    def attending(self) -> npt.NDArray[np.bool_] | None:
        """`[T]` whether each row attends to media; None where none does."""
        if not any(each.crossed for each in self.sequences):
            return None
        rows = np.zeros(self._total, bool)
        for first, each in zip(self._starts, self.sequences, strict=True):
            for crossed in each.crossed:
                shift = first - each.start
                rows[crossed.rows.start + shift : crossed.rows.stop + shift] = True
        return rows

    # -- recurrent state -----------------------------------------------------------------------

    def _build_segments(self, group: int) -> list[Segment]:
        """Single tokens of all sequences together, every chunk by itself; by format."""
        runs: dict[tuple[KVFormat, int], list[int]] = {}
        for number, each in enumerate(self.sequences):
            alone = 0 if each.count == 1 else number + 1
            runs.setdefault((each.format, alone), []).append(number)
        return [self._segment(group, format, run) for (format, _), run in runs.items()]

    def _segment(self, group: int, format: KVFormat, numbers: list[int]) -> Segment:
        """The rows of sequences of one format, which are all equally many."""
        sequences = [self.sequences[n] for n in numbers]
        count = sequences[0].count
        firsts = np.array([self._starts[n] for n in numbers], dtype=np.int32)
        rows = (firsts[:, None] + np.arange(count, dtype=np.int32)).reshape(-1)
        slots = [each.block_ids(group)[0] for each in sequences]
        return Segment(
            n=len(sequences),
            t=count,
            rows=mx.array(rows),
            pool=self._attention.pools.states(group, format),
            layer=-1,
            slots=_ints(slots),
            fresh=np.array([each.start == 0 for each in sequences]),
            targets=_targets(group, sequences, slots),
        )


class StepInputs(_Rows):
    """All rows of one step.

    Attributes:
        wanted: `[R]` rows whose final hidden states are wanted; None when it is all of them.
        ending: the sequences that these rows belong to, in order; `ScheduledSequence.wanted` each.
        narrowed: whether the model went on with those rows alone.

    Args:
        sampled: by sequence number, the row of `previous` that has the token unknown to the host.
        previous: `[R]` tokens that the step before samples.
    """

    def __init__(
        self,
        plan: StepPlan,
        attention: Attention,
        sampled: Mapping[int, int],
        previous: mx.array | None,
    ) -> None:
        super().__init__(_in_row_order(plan.sequences, attention.pools.block_tokens), attention)
        wanted = [each.wanted for each in self.sequences]
        self.ending = [each for each, rows in zip(self.sequences, wanted, strict=True) if rows]
        self.wanted: mx.array | None = None
        self.narrowed = False
        if sum(wanted) < self._total:
            firsts = [*self._starts[1:], self._total]
            ends = zip(firsts, wanted, strict=True)
            self.wanted = _ints([row for end, rows in ends for row in range(end - rows, end)])
        self.positions = mx.array(_joined([each.positions for each in self.sequences]))
        self.tokens = self._gather_tokens(sampled, previous)

    def only_wanted(self) -> tuple[Step, mx.array] | None:
        """See `models.base.Step.only_wanted`."""
        if self.wanted is None or any(each.pooled > 1 for each in self.ending):
            return None
        if not self.ending:
            return None
        self.narrowed = True
        ends = [
            replace(each, start=row, count=1)
            for each in self.ending
            for row in range(each.end - each.wanted, each.end)
        ]
        rows = _Rows(ends, self._attention)
        rows.tokens = self.tokens[self.wanted]
        rows.positions = mx.take(self.positions, self.wanted, axis=-1)
        return rows, self.wanted

    def _gather_tokens(self, sampled: Mapping[int, int], previous: mx.array | None) -> mx.array:
        """Tokens from the host, and those that are still on the device from the step before."""
        host: list[int] = []
        rows: list[int] = []
        sources: list[int] = []
        for each in self.sequences:
            host += each.tokens
            if len(each.tokens) < each.count:
                rows.append(len(host))
                sources.append(sampled[each.number])
                host.append(0)
        if not rows:
            return _ints(host)
        assert previous is not None, "a token is said to be on the device, but no step samples it"
        if len(rows) == self._total:
            same = sources == list(range(previous.shape[0]))
            return previous if same else previous[_ints(sources)]
        mixed = _ints(host)
        mixed[_ints(rows)] = previous[_ints(sources)]
        return mixed


def _in_row_order(sequences: Iterable[ScheduledSequence], size: int) -> list[ScheduledSequence]:
    """Formats apart; within a format as attention likes its rows best."""
    # Equal formats are one object, so its address stands for it.
    return sorted(
        sequences,
        key=lambda each: (id(each.format), preferred_order(each.start, each.count, size)),
    )


def _joined(positions: list[Positions]) -> npt.NDArray[np.int32] | npt.NDArray[np.float32]:
    """Positions of sequences as those of all rows: int32 `[T]`, or float32 `[axes, T]`."""
    if all(isinstance(each, range) for each in positions):
        return np.fromiter(chain.from_iterable(positions), dtype=np.int32)
    axes = max(len(each) for each in positions if not isinstance(each, range))
    parts = [
        np.broadcast_to(np.array(each, np.float32), (axes, _length(each))) for each in positions
    ]
    return np.concatenate(parts, axis=1)


def _length(positions: Positions) -> int:
    return len(positions) if isinstance(positions, range) else positions.shape[-1]


def _targets(
    group: int, sequences: list[ScheduledSequence], slots: list[int]
) -> tuple[mx.array, mx.array] | None:
    """See `Segment.targets`."""
    if not any(each.snapshots or each.drafted_states for each in sequences):
        return None
    indices: list[int] = []
    targets: list[int] = []
    for number, each in enumerate(sequences):
        own = [slot for owner, slot in each.drafted_states if owner == group] or [slots[number]]
        own += [slot for owner, slot in each.snapshots if owner == group]
        indices += [number] * len(own)
        targets += own
    return _ints(indices), _ints(targets)


def _ints(values: list[int]) -> mx.array:
    """int32 on the device."""
    return mx.array(np.array(values, dtype=np.int32))
