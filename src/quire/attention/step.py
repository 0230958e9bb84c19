"""Attention of one step: writes each layer's rows, and runs the backends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import groupby
from operator import attrgetter

import mlx.core as mx
import numpy as np

from quire.attention.backend import (
    AttentionBackend,
    AttentionCase,
    AttentionUse,
    Backends,
    PreparedAttention,
    Scoring,
)
from quire.attention.bidirectional import BidirectionalRows
from quire.attention.choice import IndexerTopK, choice_needed
from quire.attention.cross import CrossRows, build_cross
from quire.attention.metadata import AttentionMetadata, build_metadata
from quire.attention.rows import RowLists
from quire.cache.formats.base import LayerStore, WrittenBlocks
from quire.cache.formats.slots import SlotMapping
from quire.cache.pools import KVPool, Pools
from quire.cache.specs import CrossKV, KVLayout
from quire.core.arrays import Ints
from quire.core.kv_format import KVFormat
from quire.device.dtypes import from_host

_CaseKey = tuple[bool, int, mx.Dtype, bool, bool, bool, int]
"""Traits that differ between layers with the same rows: packed, heads, type, cap, sinks, keys in no
block, and the number of keys that an indexer chooses (0 without one).
"""


@dataclass(slots=True)
class _Run:
    """Adjacent sequences of one format that one backend serves.

    Attributes:
        rows: their range among the rows of the format.
        chunks: their range among the format's sequences with several rows.
        chosen: whether they see only the keys that an indexer chose.
    """

    rows: slice
    chunks: slice
    chosen: bool
    backend: AttentionBackend
    prepared: PreparedAttention


@dataclass(slots=True)
class _FormatRows:
    """The rows of one KV group in one format.

    Attributes:
        rows: among the step's; of media, among those that attend to any.
        keys: among the keys and values that the step computes.
        slots: where these are written, where the metadata does not say: of media.
        written: by layer, what its sequences with several rows wrote, in formats with tails;
            layers that share another's keys read it later in the step.
        runs: by case, who serves which rows.
        indexers: the `IndexerTopK` of each limit on keys per row.
    """

    rows: slice
    keys: slice
    pool: KVPool
    metadata: AttentionMetadata
    slots: SlotMapping | None = None
    written: dict[int, WrittenBlocks | None] = field(default_factory=dict)
    runs: dict[_CaseKey, list[_Run]] = field(default_factory=dict)
    prepared: dict[tuple[AttentionBackend, int, int, int], PreparedAttention] = field(
        default_factory=dict
    )
    """Prepared inputs by backend, length at which sequences are cut, and range of their parts;
    cases share them.
    """
    split: dict[int, AttentionMetadata] = field(default_factory=dict)
    indexers: dict[int, IndexerTopK] = field(default_factory=dict)

    def prepare(
        self, backend: AttentionBackend, start: int, end: int, *, length: int
    ) -> PreparedAttention:
        """Return sequences `[start, end)`, split at `length`, prepared by a backend.
        Prepared once.
        """
        metadata = self.split_at(length)
        key = backend, 0 if metadata is self.metadata else length, start, end
        prepared = self.prepared.get(key)
        if prepared is None:
            prepared = self.prepared[key] = backend.prepare(metadata.part(start, end))
        return prepared

    def split_at(self, length: int) -> AttentionMetadata:
        """Return the metadata with sequences split after `length` keys; 0 splits none. Made
        once.
        """
        if length not in self.split:
            self.split[length] = self.metadata.split_at(length) if length else self.metadata
        return self.split[length]

    def indexer(self, limit: int) -> IndexerTopK:
        """Return the selector of `limit` keys per row, made once."""
        if limit not in self.indexers:
            self.indexers[limit] = IndexerTopK(self.metadata, limit)
        return self.indexers[limit]


@dataclass(frozen=True, slots=True)
class Attention:
    """A model's attention: the KV pools of its layers, and the backends.

    Attributes:
        layout: of the model's layers.
        pools: the blocks; their owner resizes and copies them between steps.
    """

    layout: KVLayout
    pools: Pools
    backends: Backends

    def step(self, rows: Sequence[CrossRows], ahead: int = 0) -> StepAttention:
        """Return the attention of one step's rows.

        Args:
            rows: one entry a sequence, in the order of the step's rows; those of equal format are
                neighbours.
            ahead: number of tokens by which queries are ahead of their rows, see
                `ForwardContext.attend`. Their own keys are in no block.
        """
        return StepAttention(rows, self, ahead)


class StepAttention:
    """The rows of a step, prepared for attention. Data of a KV group is built at first use."""

    def __init__(self, rows: Sequence[CrossRows], attention: Attention, ahead: int = 0) -> None:
        self._rows, self._ahead = rows, ahead
        self._layout = attention.layout
        self._pools = attention.pools
        self._backends = attention.backends
        self._groups: dict[int, list[_FormatRows]] = {}
        self._chosen: dict[int, list[mx.array | None]] = {}
        self._uses: list[AttentionUse] = []
        self._attending: dict[int, mx.array] = {}
        """By media group, the rows that attend to any media; missing if all rows do."""

    @property
    def uses(self) -> tuple[AttentionUse, ...]:
        """The kinds of attention that layers have asked for, in order."""
        return tuple(self._uses)

    def rehearse(self, use: AttentionUse) -> None:
        """Make the arrays that such layers read from the host.

        All rows have one format, and each is a sequence's only one.
        """
        (part,) = self._parts(use.group)
        store, rows = part.pool.layers[use.owner], part.metadata.rows
        store.place(part.metadata.slots)
        q = _stand_in(rows, use.heads, use.head_dim, dtype=use.dtype)
        prepared = part.prepare(use.backend, 0, rows, length=0)
        prepared.rehearse(q, store, use.scoring)

    @cached_property
    def _bidirectional(self) -> BidirectionalRows:
        return BidirectionalRows([each.count for each in self._rows])

    def choose(self, layer: int, q: mx.array, k: mx.array, weights: mx.array, limit: int) -> None:
        chosen: list[mx.array | None] = []
        for part in self._parts(self._layout.group[layer]):
            store, rows = part.pool.indexes[layer], part.rows
            store.write(k[rows, None], k[rows, None], part.metadata.slots)
            keys = None
            if choice_needed(part.metadata, limit):
                keys = part.indexer(limit).choose(q[rows], weights[rows], store)
            chosen.append(keys)
        self._chosen[layer] = chosen

    def attend(
        self,
        layer: int,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        scoring: Scoring,
        chosen_by: int | None = None,
    ) -> mx.array:
        if (spec := self._layout.uncached.get(layer)) is not None:
            assert k is not None, "a layer that keeps nothing gets its keys"
            assert v is not None, "a layer that keeps nothing gets its values"
            assert scoring == Scoring(scoring.scale), "encoders have no softcap and no sinks"
            return self._bidirectional.attend(q, k, v, scale=scoring.scale, reach=spec.reach)
        group, owner = self._layout.group[layer], self._layout.owner[layer]
        parts = self._parts(group)
        chosen = [None] * len(parts) if chosen_by is None else self._chosen[chosen_by]
        attending = self._attending.get(group)
        if attending is None:
            return self._attend_parts(parts, owner, q, k=k, v=v, scoring=scoring, chosen=chosen)
        some = self._attend_parts(
            parts, owner, q[attending], k=k, v=v, scoring=scoring, chosen=chosen
        )
        out = mx.zeros((q.shape[0], *some.shape[1:]), dtype=some.dtype)
        out[attending] = some
        return out

    def _attend_parts(
        self,
        parts: list[_FormatRows],
        owner: int,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        scoring: Scoring,
        chosen: Sequence[mx.array | None],
    ) -> mx.array:
        """Attend for rows that each see at least one key."""
        if len(parts) == 1:
            if chosen[0] is not None:
                scoring = scoring._replace(chosen=chosen[0])
            return self._attend(parts[0], owner, q, k=k, v=v, scoring=scoring)
        outs = []
        for part, keys in zip(parts, chosen, strict=True):
            own_k = None if k is None else k[part.keys]
            own_v = None if v is None else v[part.keys]
            own = scoring.part(part.rows)._replace(chosen=keys)
            outs.append(self._attend(part, owner, q[part.rows], k=own_k, v=own_v, scoring=own))
        return mx.concatenate(outs)

    @property
    def is_plain(self) -> bool:
        """Whether all rows have one format, of plain blocks."""
        first = self._rows[0].format
        if first.scheme != "plain":
            return False
        # Nearly always one object, whose comparison with itself would take a while.
        others = [each.format for each in self._rows if each.format is not first]
        return all(each == first for each in others)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._pools.block_size

    def stores(self, layers: Iterable[int]) -> list[LayerStore]:
        """Return the blocks that layers read, where all rows have one format."""
        group, owner, format = self._layout.group, self._layout.owner, self._rows[0].format
        pools: dict[int, KVPool] = {}  # a format's hash takes a while
        found = []
        for layer in layers:
            own = group[layer]
            if own not in pools:
                pools[own] = self._pools.kv(own, format)
            found.append(pools[own].layers[owner[layer]])
        return found

    def states(self, layer: int) -> Mapping[str, mx.array]:
        """Return a layer's recurrent states, where all rows have one format."""
        pool = self._pools.states(self._layout.group[layer], self._rows[0].format)
        return pool.parts(layer)

    def _parts(self, group: int) -> list[_FormatRows]:
        """Return the step's rows in a group, by format."""
        if group not in self._groups:
            self._groups[group] = self._build(group)
        return self._groups[group]

    def _attend(
        self,
        part: _FormatRows,
        owner: int,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        scoring: Scoring,
    ) -> mx.array:
        """Attend for the rows of one format."""
        store = part.pool.layers[owner]
        if k is not None and v is not None and len(k):
            part.written[owner] = store.write(k, v, part.slots or part.metadata.slots)
        return self._read(part, owner, q, scoring=scoring)

    def _read(self, part: _FormatRows, owner: int, q: mx.array, scoring: Scoring) -> mx.array:
        """Attend for rows whose keys and values are written."""
        store, written = part.pool.layers[owner], part.written.get(owner)
        runs = self._runs(part, owner, q, scoring=scoring)
        if len(runs) == 1:
            return runs[0].prepared.forward(q, store, written, scoring=scoring)
        outs = [
            run.prepared.forward(
                q[run.rows],
                store,
                None if written is None else written.part(run.chunks),
                scoring=(scoring if run.chosen else scoring._replace(chosen=None)).part(run.rows),
            )
            for run in runs
        ]
        return mx.concatenate(outs)

    def _build(self, group: int) -> list[_FormatRows]:
        """Divide the step's rows by format."""
        spec = self._layout.groups[group].spec
        if spec.cross is not None:
            return self._build_cross(group, spec.cross)
        assert spec.attention is not None, "a recurrent group does not attend"
        parts = []
        row = 0
        size = self._pools.block_size
        for format, some, lists in self._by_format:
            metadata = build_metadata(
                group, spec.attention, some, block_size=size, lists=lists
            ).ahead(spec.attention, self._ahead)
            rows = slice(row, row + metadata.rows)
            parts.append(_FormatRows(rows, rows, self._pools.kv(group, format), metadata=metadata))
            row = rows.stop
        return parts

    def _build_cross(self, group: int, spec: CrossKV) -> list[_FormatRows]:
        """Divide the rows that attend to media by format."""
        parts: list[_FormatRows] = []
        attending: list[Ints] = []
        first = row = key = 0
        for format, some, _ in self._by_format:
            found = build_cross(group, spec, some, block_size=self._pools.block_size)
            if found is not None:
                rows = slice(row, row + found.metadata.rows)
                keys = slice(key, key + len(found.slots.blocks))
                pool = self._pools.kv(group, format)
                parts.append(
                    _FormatRows(rows, keys, pool, metadata=found.metadata, slots=found.slots)
                )
                attending.append(found.rows + first)
                row, key = rows.stop, keys.stop
            first += sum(each.count for each in some)
        assert parts, "no row attends to media"
        if row < first:
            self._attending[group] = from_host(np.concatenate(attending))
        return parts

    @cached_property
    def _by_format(self) -> list[tuple[KVFormat, Sequence[CrossRows], RowLists]]:
        """The step's sequences by format, and the lists of their rows."""
        groups = [list(some) for _, some in groupby(self._rows, key=attrgetter("format"))]
        return [(some[0].format, some, RowLists(some)) for some in groups]

    def _runs(self, part: _FormatRows, owner: int, q: mx.array, scoring: Scoring) -> list[_Run]:
        """Assign rows to backends; the result is the same for all layers of one kind."""
        store = part.pool.layers[owner]
        softcap, sinks = scoring.softcap is not None, scoring.sinks is not None
        limit = 0 if scoring.chosen is None else scoring.chosen.shape[-1]
        beside = scoring.beside is not None
        key = store.packed is None, q.shape[1], q.dtype, softcap, sinks, beside, limit
        runs = part.runs.get(key)
        if runs is None:
            runs = part.runs[key] = self._cut_runs(part, store, *key[1:])
            self._uses.append(
                AttentionUse(
                    self._layout.group[owner],
                    owner,
                    heads=q.shape[1],
                    head_dim=q.shape[2],
                    dtype=q.dtype,
                    scoring=scoring,
                    backend=runs[0].backend,
                )
            )
        return runs

    def _cut_runs(
        self,
        part: _FormatRows,
        store: LayerStore,
        heads: int,
        dtype: mx.Dtype,
        softcap: bool,
        sinks: bool,
        beside: bool,
        limit: int,
    ) -> list[_Run]:
        """Runs of neighbouring sequences that the same backend serves.

        Where an indexer chooses keys, rows that see all of them go to the backend that serves them
        without: by their position, so that it does not matter where a chunk ends. In formats with
        tails one backend serves both.
        """
        split = 0 if store.has_tail else limit
        metadata = part.split_at(split)
        case = partial(
            AttentionCase,
            format=store.format,
            spec=metadata.spec,
            block_size=metadata.block_size,
            heads=heads,
            dtype=dtype,
            softcap=softcap,
            sinks=sinks,
            beside=beside,
        )
        if metadata.rows == metadata.sequences and not limit:
            backend = self._backends.backend_for(case(rows=1))
            prepared = part.prepare(backend, 0, metadata.sequences, length=split)
            rows = slice(0, metadata.rows)
            return [_Run(rows, slice(0, 0), chosen=False, backend=backend, prepared=prepared)]
        counts = metadata.counts.tolist()
        longer = (metadata.lengths > limit).tolist() if limit else [False] * len(counts)
        kinds = list(zip(counts, longer, strict=True))
        backends = {
            (count, chosen): self._backends.backend_for(case(rows=count, chosen=chosen))
            for count, chosen in set(kinds)
        }
        served = [(backends[kind], kind[1]) for kind in kinds]
        runs = []
        start = chunks = 0
        for (backend, chosen), neighbours in groupby(served):
            end = start + len(list(neighbours))
            rows = slice(int(metadata.query_starts[start]), int(metadata.query_starts[end]))
            several = sum(1 for count in counts[start:end] if count > 1)
            prepared = part.prepare(backend, start, end, length=split)
            own = slice(chunks, chunks + several)
            runs.append(_Run(rows, own, chosen, backend=backend, prepared=prepared))
            start, chunks = end, chunks + several
        return runs


@lru_cache(maxsize=64)
def _stand_in(*shape: int, dtype: mx.Dtype) -> mx.array:
    """Return an array in the place of queries, whose numbers nobody reads."""
    return mx.zeros(shape, dtype)
