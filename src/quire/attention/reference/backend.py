"""The backend that supports every format on any device, and the oracle for the others."""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx

from quire.attention.backend import AttentionBackend, AttentionCase, PreparedAttention, Scoring
from quire.attention.metadata import AttentionMetadata
from quire.attention.reference import packed, plain
from quire.attention.reference.cuts import KeyPlaces, cut
from quire.cache.formats.base import LayerStore, PackedStore, WrittenBlocks


class ReferenceBackend(AttentionBackend):
    """Gathers blocks; MLX's attention over plain ones, products with codes over packed ones."""

    name = "MLX's operations"

    def serves(self, case: AttentionCase) -> bool:
        return True

    def prepare(self, metadata: AttentionMetadata) -> PreparedAttention:
        return _Prepared(metadata)


class _Prepared(PreparedAttention):
    def __init__(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._batches, self._chunks = cut(metadata)

    @cached_property
    def _places(self) -> KeyPlaces:
        return KeyPlaces.of(self._metadata)

    def forward(
        self, q: mx.array, store: LayerStore, written: WrittenBlocks | None, scoring: Scoring
    ) -> mx.array:
        if store.packed is None and scoring.chosen is not None:
            return plain.chosen(q, store, self._places, scoring=scoring, keys=scoring.chosen)
        if store.packed is not None:
            outs = self._packed(q, store.packed, written, scoring=scoring)
        else:
            outs = self._plain(q, store, scoring)
        if len(outs) == 1:
            return outs[0][1]
        outs.sort(key=lambda out: out[0].start)
        return mx.concatenate([out for _, out in outs])

    def rehearse(self, q: mx.array, store: LayerStore, scoring: Scoring) -> None:
        if store.packed is not None or scoring.chosen is not None or self._chunks:
            super().rehearse(q, store, scoring)
            return
        for batch in self._batches:
            plain.rehearse(batch, scoring)

    def _plain(
        self, q: mx.array, store: LayerStore, scoring: Scoring
    ) -> list[tuple[slice, mx.array]]:
        """Attend over plain blocks; return the result of each part of the rows."""
        outs: list[tuple[slice, mx.array]] = []
        for batch in self._batches:
            own, after = scoring.part(batch.rows), [out for _, out in outs[-1:]]
            out = plain.decode(_rows(q, batch.rows), store, batch, scoring=own, after=after)
            outs.append((batch.rows, out))
        for chunk in self._chunks:
            out = plain.prefill(_rows(q, chunk.rows), store, chunk, scoring=scoring)
            outs.append((chunk.rows, out))
        return outs

    def _packed(
        self, q: mx.array, store: PackedStore, written: WrittenBlocks | None, scoring: Scoring
    ) -> list[tuple[slice, mx.array]]:
        """Attend over packed blocks; return the result of each part of the rows."""
        scaled = q if scoring.scale == 1.0 else q * scoring.scale
        outs: list[tuple[slice, mx.array]] = []
        for batch in self._batches:
            own, after = scoring.part(batch.rows), [out for _, out in outs[-1:]]
            out = packed.decode(_rows(scaled, batch.rows), store, batch, scoring=own, after=after)
            outs.append((batch.rows, out.astype(q.dtype)))
        for number, chunk in enumerate(self._chunks):
            blocks = None if written is None else written.part(slice(number, number + 1))
            own = scoring.part(chunk.rows)
            out = packed.prefill(
                _rows(scaled, chunk.rows), store, chunk, written=blocks, scoring=own
            )
            outs.append((chunk.rows, out.astype(q.dtype)))
        return outs


def _rows(q: mx.array, rows: slice) -> mx.array:
    return q if rows.stop - rows.start == q.shape[0] else q[rows]
