"""Attention by the compiled CPU kernels. A row's bits do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from quire.attention.backend import AttentionBackend, AttentionCase, PreparedAttention, Scoring
from quire.attention.metadata import AttentionMetadata
from quire.attention.rows import GroupLists, RowLists
from quire.cache.formats.base import CodedLayout, LayerStore, PackedStore, WrittenBlocks
from quire.core.arrays import Ints
from quire.device.cpu.kernels import CPUKernels

Move = Callable[[mx.array, Sequence[int]], mx.array]
"""Moves numbers back with rows: int32 `[M]`, and the row of each number, or -1."""
_MULTIPLE = 16
"""Head sizes and block sizes must be multiples of this, the kernels' longest vector."""


class CPUBackend(AttentionBackend):
    """Reads blocks in place, coded ones too. Supports float32 queries."""

    name = "CPU kernels"

    def __init__(self, kernels: CPUKernels) -> None:
        self._layouts = _Layouts(kernels.ops)

    def serves(self, case: AttentionCase) -> bool:
        sizes = case.spec.head_dim, case.spec.value_dim, case.block_size
        odd = case.chosen or case.beside or case.values_by_channel
        known = case.dtype == mx.float32 and not odd
        return known and all(size % _MULTIPLE == 0 for size in sizes)

    def prepare(self, metadata: AttentionMetadata) -> PreparedAttention:
        return _Prepared(self._layouts, metadata)


class _Layouts:
    """Layouts converted for the extension, once each."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self._made: dict[CodedLayout, Any] = {}

    def of(self, layout: CodedLayout) -> Any:
        """Return the layout in the extension's form."""
        if layout not in self._made:
            key, value = layout.key_rotation, layout.value_rotation
            self._made[layout] = self.ops.CodedLayout(
                layout.key_bits,
                layout.value_bits,
                codebook=layout.codebook,
                by_channel=layout.by_channel,
                key_rotation=key and key.map,
                key_rotation_scale=key.scale if key else 1.0,
                value_rotation=value and value.map,
                value_rotation_scale=value.scale if value else 1.0,
            )
        return self._made[layout]


class _Prepared(PreparedAttention):
    def __init__(self, layouts: _Layouts, metadata: AttentionMetadata) -> None:
        self._layouts = layouts
        self._ops = layouts.ops
        self._kv_heads = metadata.spec.kv_heads
        self._block_size = metadata.block_size
        self._has_tails = metadata.tails is not None
        self._tables = paged_tables(self._ops, metadata)

    def forward(
        self, q: mx.array, store: LayerStore, written: WrittenBlocks | None, scoring: Scoring
    ) -> mx.array:
        if store.packed is not None:
            return self._packed(q, store.packed, written, scoring=scoring)
        keys, *values = store.arrays()
        out: mx.array = self._ops.attend(
            q,
            keys,
            values[0] if values else keys,
            self._tables,
            kv_heads=self._kv_heads,
            scale=scoring.scale,
            softcap=scoring.softcap or 0.0,
            sinks=scoring.sinks,
        )
        return out if values else out[..., : store.shape.value_dim]

    def _packed(
        self, q: mx.array, store: PackedStore, written: WrittenBlocks | None, scoring: Scoring
    ) -> mx.array:
        as_written: list[mx.array] = []
        if self._has_tails:
            as_written += store.tail_arrays()
            if written is not None:
                as_written += (written.keys.flatten(0, 1), written.values.flatten(0, 1))
        codes = store.coded()
        out: mx.array = self._ops.attend_coded(
            q,
            self._layouts.of(codes.layout),
            codes.keys,
            codes.values,
            self._block_size,
            self._tables,
            as_written,
            self._kv_heads,
            store.shape.value_dim,
            scoring.scale,
            scoring.softcap or 0.0,
            scoring.sinks,
        )
        return out


def paged_tables(ops: Any, metadata: AttentionMetadata) -> Any:
    """Return the tables of a group's rows in the extension's form.

    Args:
        ops: the extension of CPU kernels.
    """
    tables = [
        metadata.block_table,
        metadata.table_starts,
        metadata.first_blocks,
        metadata.query_starts,
        metadata.first_visible,
        metadata.last_visible,
    ]
    if metadata.tails is not None:
        tables += _written_places(metadata, metadata.tails)
    return ops.Tables(mx.array(np.concatenate(tables)), [len(each) for each in tables])


def plain_tables(ops: Any, rows: RowLists, own: GroupLists, move: Move | None = None) -> Any:
    """Return `paged_tables` of rows in plain blocks, none of which sees later rows.

    Args:
        own: the lists of the KV group.
        move: moves keys back with the rows; None if all begin where they say.
    """
    tables = (
        own.block_table,
        own.table_starts,
        own.first_blocks,
        rows.query_starts,
        own.first_visible,
        rows.keys,
    )
    joined = mx.array(np.frombuffer(b"".join(tables), np.int32))
    if move is not None:
        count = len(rows.keys)
        joined = move(joined, [-1] * (len(joined) - 2 * count) + 2 * list(range(count)))
    return ops.Tables(joined, [len(each) for each in tables])


def _written_places(metadata: AttentionMetadata, tails: Ints) -> list[Ints]:
    """Return where each row finds its own block and later ones uncoded.

    A sequence with one row has its tail, in the tail pool (source 0). A sequence with several rows
    has the blocks that it wrote in this step (source 1), consecutively from its first row's block.

    Returns:
        `[T]` number of each row's own block; `[S]` sources; `[T]` index of the own block in the
        source.
    """
    own = metadata.keys // metadata.block_size
    if metadata.rows == metadata.sequences:
        return [own, np.zeros(len(own), np.int32), tails]
    several = metadata.counts > 1
    first, last = own[metadata.query_starts[:-1]], own[metadata.query_starts[1:] - 1]
    blocks = np.where(several, last + 1 - first, 0)  # that each wrote
    starts = np.where(several, np.cumsum(blocks) - blocks, tails)
    places = own + np.repeat(starts - first, metadata.counts)
    return [own, several.astype(np.int32), places.astype(np.int32)]
