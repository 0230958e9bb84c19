"""Attention by the compiled CPU kernels: a row's bits are its own, whatever stands beside it."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from quire.attention.backend import AttentionBackend, AttentionCase, PreparedAttention, Scoring
from quire.attention.metadata import AttentionMetadata
from quire.cache.formats.base import LayerStore, PackedStore, WrittenBlocks
from quire.cache.specs import Ints
from quire.device.cpu.kernels import CPUKernels
from quire.device.operations import Turn

_MULTIPLE = 16
"""Of head sizes and blocks: the longest vector that a kernel works with."""


class CPUBackend(AttentionBackend):
    """Reads blocks where they lie, codes too. Serves float32 queries."""

    def __init__(self, kernels: CPUKernels) -> None:
        self._kernels = kernels

    def serves(self, case: AttentionCase) -> bool:
        sizes = case.spec.head_dim, case.spec.value_dim, case.block_tokens
        known = case.dtype == mx.float32 and not (case.chosen or case.values_by_channel)
        return known and all(size % _MULTIPLE == 0 for size in sizes)

    def prepare(self, metadata: AttentionMetadata) -> PreparedAttention:
        return _Prepared(self._kernels, metadata)


class _Prepared(PreparedAttention):
    def __init__(self, kernels: CPUKernels, metadata: AttentionMetadata) -> None:
        self._ops = kernels.ops
        self._kv_heads = metadata.spec.kv_heads
        self._block_tokens = metadata.block_tokens
        self._tables = [
            mx.array(each)
            for each in (
                metadata.block_table,
                metadata.table_starts,
                metadata.first_blocks,
                metadata.query_starts,
                metadata.first_visible,
                metadata.last_visible,
            )
        ]
        self._places = [] if metadata.tails is None else _written_places(metadata, metadata.tails)

    def forward(
        self, q: mx.array, store: LayerStore, written: Sequence[WrittenBlocks], scoring: Scoring
    ) -> mx.array:
        if store.packed is not None:
            return self._packed(q, store.packed, written, scoring)
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
        self, q: mx.array, store: PackedStore, written: Sequence[WrittenBlocks], scoring: Scoring
    ) -> mx.array:
        as_written: list[mx.array] = []
        if self._places:
            as_written += store.tail_arrays()
            for blocks in written:
                as_written += (blocks.keys.flatten(0, 1), blocks.values.flatten(0, 1))
        codes = store.coded()
        out: mx.array = self._ops.attend_coded(
            q,
            codes.keys,
            codes.key_bits,
            codes.values,
            codes.value_bits,
            codebook=codes.codebook,
            by_channel=codes.by_channel,
            block_tokens=self._block_tokens,
            **_turn("key", codes.key_turn),
            **_turn("value", codes.value_turn),
            tables=self._tables,
            written=as_written,
            places=self._places,
            kv_heads=self._kv_heads,
            value_dim=store.shape.value_dim,
            scale=scoring.scale,
            softcap=scoring.softcap or 0.0,
            sinks=scoring.sinks,
        )
        return out


def _turn(of: str, turn: Turn | None) -> dict[str, mx.array | float | None]:
    """The arguments that say how something is rotated."""
    if turn is None:
        return {f"{of}_turn": None, f"{of}_scale": 1.0}
    return {f"{of}_turn": turn.map, f"{of}_scale": turn.scale}


def _written_places(metadata: AttentionMetadata, tails: Ints) -> list[mx.array]:
    """Where each row finds its own block, and those behind it, as written.

    A sequence with one row has its tail, which lies in the tail pool, source 0. One with several
    has the blocks that it wrote in this step, from the first row's block on.

    Returns:
        `[T]` the number of each row's own block; `[S]` sources; `[T]` the place of the own block
        in the source.
    """
    own = metadata.keys // metadata.block_tokens
    several = metadata.counts > 1
    if not several.any():
        return [mx.array(own), mx.zeros(len(own), dtype=mx.int32), mx.array(tails)]
    sources = np.where(several, np.cumsum(several), 0).astype(np.int32)
    first_own = own[metadata.query_starts[:-1]]
    begins = np.repeat(np.where(several, first_own, 0), metadata.counts)
    places = np.where(np.repeat(several, metadata.counts), own - begins, 0)
    places += np.repeat(np.where(several, 0, tails), metadata.counts)
    return [mx.array(each.astype(np.int32)) for each in (own, sources, places)]
