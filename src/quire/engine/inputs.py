"""From a plan to the flat arrays of one step, and the face of the step that a model sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from quire.cache.pools import KVPool, Pools
from quire.cache.specs import (
    FullKV,
    KVFormat,
    KVGroup,
    LayerSpec,
    RecurrentState,
    SharedKV,
    WindowKV,
    first_visible,
)
from quire.cache.states import Segment
from quire.cache.view import Chunk, DecodeBatch, Ints, View
from quire.models.base import RecurrentSegment
from quire.scheduler.plan import StepPlan, Work
from quire.scheduler.sequence import PageIds

_SHORT_PAGES = 15
"""Page tables up to this long share one batch; longer ones share with those of like length."""


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
        owner = [spec.layer if isinstance(spec, SharedKV) else i for i, spec in enumerate(specs)]
        return Layout(groups, tuple(home[layer] for layer in owner), tuple(owner))


class StepInputs:
    """One step as a model sees it; implements `models.base.Step`.

    Attributes:
        work: in the order of the rows.
        wanted: `[R]` rows whose logits are wanted; None when it is all of them.
        sampled: the work that each wanted row belongs to.
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
        self._layout = layout
        self._pools = pools
        self._epoch = epoch
        self._saves = dict(plan.saves)
        self.embeddings: mx.array | None = None
        self.work = sorted(plan.work, key=lambda w: _row_order(w, pools.page_tokens))
        counts = [work.count for work in self.work]
        ends = np.cumsum(counts)
        self._starts = ends - counts
        self.sampled = [work for work in self.work if work.sample]
        total = int(ends[-1])
        wanted = [int(end) - 1 for end, w in zip(ends, self.work, strict=True) if w.sample]
        self.wanted = None if len(wanted) == total else mx.array(np.array(wanted, dtype=np.int32))
        self.tokens = self._gather_tokens(total, drawn, previous)
        self.positions = mx.array(
            np.concatenate([np.arange(w.start, w.end, dtype=np.int32) for w in self.work])
        )
        self._parts: dict[int, list[_Part]] = {}
        self._segments: dict[int, list[Segment]] = {}

    def _gather_tokens(
        self, total: int, drawn: Mapping[str, int], previous: mx.array | None
    ) -> mx.array:
        """Tokens from the host, and those that are still on the device from the step before."""
        host = np.zeros(total, dtype=np.int32)
        rows: list[int] = []
        sources: list[int] = []
        for start, work in zip(self._starts, self.work, strict=True):
            tokens = work.seq.tokens
            if work.start < len(tokens):
                host[start : start + work.count] = tokens[work.start : work.end]
            else:
                rows.append(int(start))
                sources.append(drawn[work.seq.id])
        if not rows:
            return mx.array(host)
        assert previous is not None, "a token is said to be on the device, but no step drew it"
        if len(rows) == total:
            if sources == list(range(previous.shape[0])):
                return previous
            return previous[mx.array(np.array(sources, dtype=np.int32))]
        mixed = mx.array(host)
        mixed[mx.array(np.array(rows, dtype=np.int32))] = previous[
            mx.array(np.array(sources, dtype=np.int32))
        ]
        return mixed

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

    # -- attention -----------------------------------------------------------------------------

    def _build_parts(self, group: int) -> list[_Part]:
        """One part for each format present; rows of equal format are neighbours."""
        spec = self._layout.groups[group].spec
        assert not isinstance(spec, RecurrentState)
        parts = []
        at = 0
        while at < len(self.work):
            format = self.work[at].seq.format
            end = at
            while end < len(self.work) and self.work[end].seq.format == format:
                end += 1
            first = int(self._starts[at])
            last = int(self._starts[end - 1]) + self.work[end - 1].count
            view = self._build_view(group, spec, self.work[at:end])
            parts.append(_Part(slice(first, last), self._pools.kv(group, format), view))
            at = end
        return parts

    def _build_view(self, group: int, spec: FullKV | WindowKV, work: list[Work]) -> View:
        size = self._pools.page_tokens
        ids = [self._ids(w, group) for w in work]
        positions = [np.arange(w.start, w.end, dtype=np.int32) for w in work]
        view = View(
            pages=np.concatenate([i[p // size] for i, p in zip(ids, positions, strict=True)]),
            offsets=np.concatenate(positions) % size,
            batches=[],
            chunks=[],
            kv_heads=spec.kv_heads,
            page_tokens=size,
        )
        single = sum(1 for w in work if w.count == 1)
        view.batches = _batches(spec, work[:single], ids[:single], group, size)
        at = single
        for w, table, where in zip(work[single:], ids[single:], positions[single:], strict=True):
            view.chunks.append(_chunk(spec, w, table, where, at, group, size))
            at += w.count
        return view

    def _ids(self, work: Work, group: int) -> Ints:
        ids = work.seq.page_ids.setdefault(group, PageIds())
        return np.array(ids.read(work.seq.tables[group], self._epoch), dtype=np.int32)

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
                    slots=mx.array(np.array([s.id for s in states if s], dtype=np.int32)),
                    fresh=np.array([w.start == 0 for w in works]),
                    saves=_save_arrays(saves),
                )
            )
        return segments


def _row_order(work: Work, size: int) -> tuple[str, bool, int]:
    """Formats apart; single tokens before chunks; tables of like length together."""
    length = _bucket(work.end // size + 1) if work.count == 1 else 0
    return work.seq.format.name, work.count > 1, length


def _bucket(pages: int) -> int:
    return max(pages, _SHORT_PAGES).bit_length()


def _save_arrays(saves: list[tuple[int, int]]) -> tuple[mx.array, mx.array] | None:
    if not saves:
        return None
    pairs = np.array(saves, dtype=np.int32)
    return mx.array(pairs[:, 0]), mx.array(pairs[:, 1])


def _batches(
    spec: FullKV | WindowKV, work: list[Work], ids: list[Ints], group: int, size: int
) -> list[DecodeBatch]:
    """Generating rows, cut where the page tables' lengths differ much."""
    batches: list[DecodeBatch] = []
    at = 0
    spans = [(first_visible(spec, w.start) // size, w.start // size + 1) for w in work]
    while at < len(work):
        bucket = _bucket(spans[at][1] - spans[at][0])
        end = at
        while end < len(work) and _bucket(spans[end][1] - spans[end][0]) == bucket:
            end += 1
        some = range(at, end)
        width = max(spans[i][1] - spans[i][0] for i in some)
        pages = np.zeros((end - at, width), dtype=np.int32)
        for row, i in enumerate(some):
            low, high = spans[i]
            pages[row, : high - low] = ids[i][low:high]
        base = np.array([spans[i][0] * size for i in some], dtype=np.int32)
        own = np.array([work[i].start for i in some], dtype=np.int32)
        first = np.array([first_visible(spec, work[i].start) for i in some], dtype=np.int32)
        opens = None
        if work[at].seq.format.seals:
            opens = np.array([work[i].seq.opens[group].id for i in some], dtype=np.int32)
        batches.append(
            DecodeBatch(slice(at, end), pages, first - base, own - base, spec.kv_heads, size, opens)
        )
        at = end
    return batches


def _chunk(
    spec: FullKV | WindowKV,
    work: Work,
    ids: Ints,
    positions: Ints,
    at: int,
    group: int,
    size: int,
) -> Chunk:
    low = first_visible(spec, work.start) // size
    high = (work.end - 1) // size + 1
    first = positions * 0
    if isinstance(spec, WindowKV):
        first = np.maximum(positions - spec.window + 1, 0)
    opens = work.seq.opens[group].id if work.seq.format.seals else None
    rows = slice(at, at + work.count)
    # Rows that see everything see from the first page on, which is then also the first listed.
    base = low * size
    return Chunk(rows, ids[low:high], first - base, positions - base, spec.kv_heads, size, opens)
