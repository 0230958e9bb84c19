"""Attention of one step: each layer's rows written, and read by the backends that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from quire.attention.backend import (
    AttentionBackend,
    AttentionCase,
    Backends,
    PreparedAttention,
    Scoring,
)
from quire.attention.metadata import AttentionMetadata, AttentionRows, build_metadata
from quire.attention.reference.cuts import length_class
from quire.cache.formats.base import LayerStore, WrittenBlocks
from quire.cache.pools import KVPool, Pools
from quire.cache.specs import KVLayout

_CaseKey = tuple[bool, int, mx.Dtype, bool, bool]
"""What differs between layers of the same rows: packed or plain, heads, type, cap, sinks."""


@dataclass(slots=True)
class _Run:
    """Neighbouring sequences of one format that one backend serves.

    Attributes:
        rows: among the rows of the format.
        chunks: among the format's sequences with several rows.
    """

    rows: slice
    chunks: slice
    prepared: PreparedAttention


@dataclass(slots=True)
class _FormatRows:
    """The rows of one KV group in one format.

    Attributes:
        rows: among the step's.
        written: by layer, what its sequences with several rows wrote, in formats with tails;
            layers that share another's keys read it later in the step.
        runs: by case, who serves which rows.
    """

    rows: slice
    pool: KVPool
    metadata: AttentionMetadata
    written: dict[int, list[WrittenBlocks]] = field(default_factory=dict)
    runs: dict[_CaseKey, list[_Run]] = field(default_factory=dict)
    prepared: dict[tuple[AttentionBackend, int, int], PreparedAttention] = field(
        default_factory=dict
    )
    """By backend and range of sequences; cases share them."""

    def prepare(self, backend: AttentionBackend, begin: int, end: int) -> PreparedAttention:
        """Mutates: the sequences `[begin, end)` prepared by a backend, once."""
        prepared = self.prepared.get((backend, begin, end))
        if prepared is None:
            prepared = backend.prepare(self.metadata.part(begin, end))
            self.prepared[backend, begin, end] = prepared
        return prepared


@dataclass(frozen=True, slots=True)
class Attention:
    """A model's attention: where its layers keep keys and values, and who computes.

    Attributes:
        layout: of the model's layers.
        pools: the blocks; their owner resizes and copies them between steps.
    """

    layout: KVLayout
    pools: Pools
    backends: Backends

    def step(self, rows: Sequence[AttentionRows]) -> StepAttention:
        """Attention of one step's rows.

        Args:
            rows: one entry a sequence, in the order of the step's rows; those of equal format are
                neighbours.
        """
        return StepAttention(rows, self)


class StepAttention:
    """The rows of a step as attention sees them. Builds what a KV group needs when first asked."""

    def __init__(self, rows: Sequence[AttentionRows], attention: Attention) -> None:
        self._rows = rows
        self._layout = attention.layout
        self._pools = attention.pools
        self._backends = attention.backends
        self._groups: dict[int, list[_FormatRows]] = {}

    def attend(
        self, layer: int, q: mx.array, k: mx.array | None, v: mx.array | None, scoring: Scoring
    ) -> mx.array:
        """See `models.base.Step.attend`."""
        group, owner = self._layout.group[layer], self._layout.owner[layer]
        parts = self._groups.get(group)
        if parts is None:
            parts = self._groups[group] = self._build(group)
        if len(parts) == 1:
            return self._attend(parts[0], owner, q, k, v, scoring)
        outs = []
        for part in parts:
            own_k = None if k is None else k[part.rows]
            own_v = None if v is None else v[part.rows]
            outs.append(self._attend(part, owner, q[part.rows], own_k, own_v, scoring))
        return mx.concatenate(outs)

    def _attend(
        self,
        part: _FormatRows,
        owner: int,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        scoring: Scoring,
    ) -> mx.array:
        """The same for the rows of one format."""
        store = part.pool.layers[owner]
        if k is not None and v is not None:
            part.written[owner] = store.write(k, v, part.metadata.slots)
        written = part.written.get(owner, ())
        runs = self._runs(part, store, q, scoring)
        if len(runs) == 1:
            return runs[0].prepared.forward(q, store, written, scoring)
        outs = [
            run.prepared.forward(q[run.rows], store, written[run.chunks], scoring) for run in runs
        ]
        return mx.concatenate(outs)

    def _build(self, group: int) -> list[_FormatRows]:
        """The step's rows, cut where the format changes."""
        spec = self._layout.groups[group].spec.attention
        assert spec is not None, "a recurrent group does not attend"
        parts = []
        begin = row = 0
        while begin < len(self._rows):
            format = self._rows[begin].format
            end = begin
            while end < len(self._rows) and self._rows[end].format == format:
                end += 1
            metadata = build_metadata(group, spec, self._rows[begin:end], self._pools.block_tokens)
            rows = slice(row, row + metadata.rows)
            parts.append(_FormatRows(rows, self._pools.kv(group, format), metadata))
            begin, row = end, rows.stop
        return parts

    def _runs(
        self, part: _FormatRows, store: LayerStore, q: mx.array, scoring: Scoring
    ) -> list[_Run]:
        """Which backend serves which rows; the same for all layers alike."""
        softcap, sinks = scoring.softcap is not None, scoring.sinks is not None
        key = store.packed is None, q.shape[1], q.dtype, softcap, sinks
        runs = part.runs.get(key)
        if runs is None:
            runs = part.runs[key] = self._choose(part, store, *key[1:])
        return runs

    def _choose(
        self,
        part: _FormatRows,
        store: LayerStore,
        heads: int,
        dtype: mx.Dtype,
        softcap: bool,
        sinks: bool,
    ) -> list[_Run]:
        """Runs of neighbouring sequences that the same backend serves."""
        metadata = part.metadata
        counts = metadata.counts.tolist()
        by_count = {
            count: self._backends.backend_for(
                AttentionCase(
                    store.format,
                    metadata.spec,
                    metadata.block_tokens,
                    heads,
                    count,
                    dtype,
                    softcap,
                    sinks,
                )
            )
            for count in set(counts)
        }
        chosen = [by_count[count] for count in counts]
        runs = []
        begin = chunks = 0
        while begin < len(chosen):
            end = begin
            while end < len(chosen) and chosen[end] is chosen[begin]:
                end += 1
            rows = slice(int(metadata.query_starts[begin]), int(metadata.query_starts[end]))
            several = sum(1 for count in counts[begin:end] if count > 1)
            prepared = part.prepare(chosen[begin], begin, end)
            runs.append(_Run(rows, slice(chunks, chunks + several), prepared))
            begin, chunks = end, chunks + several
        return runs


def preferred_order(start: int, count: int, block_tokens: int) -> tuple[bool, int]:
    """Orders the sequences of a step: single rows first, block tables of like length together.

    Any order is right. In this one a backend that cuts rows into batches makes few of them.
    """
    several = count > 1
    return several, 0 if several else length_class((start + count) // block_tokens + 1)
