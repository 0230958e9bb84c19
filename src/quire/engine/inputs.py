"""From a plan to the flat arrays of one step, and the face of the step that a model sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np

from quire.cache.block_manager import Block
from quire.cache.pools import KVPool, Pools
from quire.cache.specs import KVGroup, LayerSpec
from quire.cache.states import Segment
from quire.cache.view import View
from quire.core.kv_format import KVFormat
from quire.engine.views import build_view, length_class
from quire.models.base import MediaRows, RecurrentSegment, Step
from quire.scheduler.plan import StepPlan, Work


@dataclass
class _Part:
    """The rows of one format in one group: a slice of the step's rows."""

    rows: slice
    pool: KVPool
    view: View


@dataclass(frozen=True)
class Layout:
    """Where each layer keeps its state.

    Attributes:
        group: by layer, the group that serves it; a sharing layer has its owner's.
        owner: by layer, the layer whose pages it reads.
    """

    groups: tuple[KVGroup, ...]
    group: tuple[int, ...]
    owner: tuple[int, ...]

    @staticmethod
    def of(specs: tuple[LayerSpec, ...], groups: tuple[KVGroup, ...]) -> Layout:
        """Resolves the layers that share another's keys and values."""
        home = {layer: group.index for group in groups for layer in group.layers}
        owner = [spec.owner(layer) for layer, spec in enumerate(specs)]
        return Layout(groups, tuple(home[layer] for layer in owner), tuple(owner))


class _Rows:
    """Rows as a model sees them; implements `models.base.Step`.

    Attributes:
        work: in the order of the rows.
        tokens, positions, media: see `Step`; whoever makes this sets the first two.
    """

    tokens: mx.array
    positions: mx.array
    media: MediaRows | None = None

    def __init__(
        self, work: list[Work], layout: Layout, pools: Pools, epoch: int, saves: dict[Block, Block]
    ) -> None:
        self.work = work
        self._layout = layout
        self._pools = pools
        self._epoch = epoch
        self._saves = saves
        self._starts = [0, *accumulate(each.count for each in work)]
        self._total = self._starts.pop()
        self._parts: dict[int, list[_Part]] = {}
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
        sinks: mx.array | None = None,
    ) -> mx.array:
        """See `models.base.Step.attend`."""
        group, owner = self._layout.group[layer], self._layout.owner[layer]
        parts = self._parts.get(group)
        if parts is None:
            parts = self._parts[group] = self._build_parts(group)
        outs = []
        for part in parts:
            store = part.pool.layers[owner]
            alone = len(parts) == 1
            if k is not None and v is not None:
                kp, vp = (k, v) if alone else (k[part.rows], v[part.rows])
                store.write(kp, vp, part.view)
            qp = q if alone else q[part.rows]
            outs.append(store.attend(qp, part.view, scale=scale, sinks=sinks))
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    def recurrent(self, layer: int) -> list[RecurrentSegment]:
        """See `models.base.Step.recurrent`."""
        group = self._layout.group[layer]
        if group not in self._segments:
            self._segments[group] = self._build_segments(group)
        return [
            Segment(s.n, s.t, s.rows, s.pool, layer, s.slots, s.fresh, s.saves)
            for s in self._segments[group]
        ]

    def only_wanted(self) -> tuple[Step, mx.array] | None:
        """See `models.base.Step.only_wanted`."""
        return None

    # -- attention -----------------------------------------------------------------------------

    def _build_parts(self, group: int) -> list[_Part]:
        """One part for each format present; rows of equal format are neighbours."""
        spec = self._layout.groups[group].spec.attention
        assert spec is not None, "a recurrent group does not attend"
        parts = []
        at = 0
        while at < len(self.work):
            format = self.work[at].seq.format
            end = at
            while end < len(self.work) and self.work[end].seq.format == format:
                end += 1
            first = self._starts[at]
            last = self._starts[end - 1] + self.work[end - 1].count
            view = build_view(group, spec, self.work[at:end], self._epoch, self._pools.page_tokens)
            parts.append(_Part(slice(first, last), self._pools.kv(group, format), view))
            at = end
        return parts

    # -- recurrent state -----------------------------------------------------------------------

    def _build_segments(self, group: int) -> list[Segment]:
        """Single tokens of all sequences together, every chunk by itself; by format."""
        segments = []
        runs: dict[tuple[KVFormat, int], list[int]] = {}
        for number, work in enumerate(self.work):
            alone = 0 if work.count == 1 else number + 1
            runs.setdefault((work.seq.format, alone), []).append(number)
        for (format, _), numbers in runs.items():
            works = [self.work[n] for n in numbers]
            rows = np.concatenate(
                [np.arange(self.work[n].count, dtype=np.int32) + self._starts[n] for n in numbers]
            )
            states = [w.seq.tables[group][0] for w in works]
            saves = [
                (i, self._saves[state].id)
                for i, state in enumerate(states)
                if state is not None and state in self._saves
            ]
            segments.append(
                Segment(
                    n=len(works),
                    t=works[0].count,
                    rows=mx.array(rows.astype(np.int32)),
                    pool=self._pools.states(group, format),
                    layer=-1,
                    slots=_ints([state.id for state in states if state is not None]),
                    fresh=np.array([w.start == 0 for w in works]),
                    saves=_save_arrays(saves),
                )
            )
        return segments


class StepInputs(_Rows):
    """All rows of one step.

    Attributes:
        wanted: `[R]` rows whose logits are wanted; None when it is all of them.
        sampled: the work that each wanted row belongs to.
        narrowed: whether the model went on with those rows alone.
    """

    def __init__(
        self,
        plan: StepPlan,
        layout: Layout,
        pools: Pools,
        epoch: int,
        drawn: Mapping[str, int],
        previous: mx.array | None,
    ) -> None:
        work = _in_row_order(plan.work, pools.page_tokens)
        super().__init__(work, layout, pools, epoch, dict(plan.saves))
        self.sampled = [work for work in self.work if work.sample]
        self.wanted: mx.array | None = None
        self.narrowed = False
        if len(self.sampled) == self._total:
            positions = np.array([work.start for work in self.work], dtype=np.int32)
        else:
            rows = zip(self._starts, self.work, strict=True)
            self.wanted = _ints([start + w.count - 1 for start, w in rows if w.sample])
            spans = [np.arange(w.start, w.end, dtype=np.int32) for w in self.work]
            positions = np.concatenate(spans)
        self.positions = mx.array(positions)
        self.tokens = self._gather_tokens(self._total, drawn, previous)

    def only_wanted(self) -> tuple[Step, mx.array] | None:
        """See `models.base.Step.only_wanted`."""
        if self.wanted is None or not self.sampled:
            return None
        self.narrowed = True
        ends = [Work(work.seq, work.end - 1, 1, sample=True) for work in self.sampled]
        rows = _Rows(ends, self._layout, self._pools, self._epoch, {})
        rows.tokens = self.tokens[self.wanted]
        rows.positions = self.positions[self.wanted]
        return rows, self.wanted

    def _gather_tokens(
        self, total: int, drawn: Mapping[str, int], previous: mx.array | None
    ) -> mx.array:
        """Tokens from the host, and those that are still on the device from the step before."""
        host: list[int] = []
        rows: list[int] = []
        sources: list[int] = []
        for work in self.work:
            tokens = work.seq.tokens
            if work.start < len(tokens):
                host += tokens[work.start : work.end]
            else:
                rows.append(len(host))
                sources.append(drawn[work.seq.id])
                host.append(0)
        if not rows:
            return _ints(host)
        assert previous is not None, "a token is said to be on the device, but no step drew it"
        if len(rows) == total:
            same = sources == list(range(previous.shape[0]))
            return previous if same else previous[_ints(sources)]
        mixed = _ints(host)
        mixed[_ints(rows)] = previous[_ints(sources)]
        return mixed


def _in_row_order(work: list[Work], size: int) -> list[Work]:
    """Formats apart; single tokens before chunks; tables of like length together."""
    # Equal formats are one object, so its address stands for it.
    return sorted(
        work,
        key=lambda w: (
            id(w.seq.format),
            w.count > 1,
            length_class(w.end // size + 1) if w.count == 1 else 0,
        ),
    )


def _save_arrays(saves: list[tuple[int, int]]) -> tuple[mx.array, mx.array] | None:
    if not saves:
        return None
    return _ints([kept for kept, _ in saves]), _ints([slot for _, slot in saves])


def _ints(values: list[int]) -> mx.array:
    """int32 on the device."""
    return mx.array(np.array(values, dtype=np.int32))
