"""The backend of the portable kernels: rows that generate, on Metal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import mlx.core as mx
import numpy as np

from quire.attention.backend import AttentionCase, PreparedAttention, Scoring
from quire.attention.metadata import AttentionMetadata
from quire.attention.paged.checked import CheckedBackend
from quire.attention.paged.portable_kernels import LONGEST, Codes, Launch, Shape, attend, merge
from quire.attention.paged.target import Target
from quire.attention.paged.tiles import FEW_ROWS, TILE_FIELDS, cut
from quire.cache.formats.base import LayerStore, PackedStore, WrittenBlocks
from quire.cache.specs import FullKV, Ints
from quire.core.kv_format import KVFormat

_MOST_GROUP = 32
"""Query heads of a KV head: with more, products bound the time, not what is read."""
_BITS = (2, 4, 8)


class PortableBackend(CheckedBackend):
    """Serves plain blocks of any floating type, and single rows over page codes.

    Prompts are left to MLX's own products.

    Args:
        target: what the kernels are compiled for.
        dtypes: of queries.
    """

    sample: ClassVar = AttentionCase(
        KVFormat(), FullKV(2, 64), 64, 4, 1, mx.float32, softcap=False, sinks=False
    )

    def __init__(self, target: Target, dtypes: Iterable[mx.Dtype]) -> None:
        self.name = f"portable paged attention ({target.name})"
        self._target = target
        self._dtypes = tuple(dtypes)

    def made_for(self, case: AttentionCase) -> bool:
        spec = case.spec
        return (
            (case.format.scheme == "plain" or _reads_codes(case))
            and case.dtype in self._dtypes
            and case.rows <= FEW_ROWS
            and max(spec.head_dim, spec.value_dim) <= LONGEST
            and case.heads // spec.kv_heads <= _MOST_GROUP
        )

    def prepare(self, metadata: AttentionMetadata) -> PreparedAttention:
        return _Prepared(self._target, metadata)


def _reads_codes(case: AttentionCase) -> bool:
    """Single rows: those of a prompt read blocks that they have written themselves."""
    bits = case.format.key_bits, case.format.value_bits
    known = case.format.scheme == "page" and all(each in _BITS for each in bits)
    known = known and case.spec.attention is not None  # blocks of media have no tails
    return known and case.rows == 1 and case.spec.value_dim % 32 == 0


class _Prepared(PreparedAttention):
    """A step's rows on the device. Cut when the first layer says how many heads queries have."""

    def __init__(self, target: Target, metadata: AttentionMetadata) -> None:
        self._target = target
        self._metadata = metadata
        self._launches: dict[Shape, Launch] = {}
        self._coded: dict[Shape, tuple[Launch, Launch]] = {}

    def forward(
        self, q: mx.array, store: LayerStore, written: Sequence[WrittenBlocks], scoring: Scoring
    ) -> mx.array:
        if store.packed is not None:
            return self._packed(q, store.packed, scoring)
        shape = self._shape(q, scoring, q.dtype)
        if shape not in self._launches:
            self._launches[shape] = _launch(self._metadata, shape)
        keys, *values = store.arrays()
        blocks = [keys, values[0] if values else keys]
        found = attend(self._target, q, blocks, self._launches[shape], scoring, shape)
        return merge(self._target, found, [], scoring.sinks, shape)[0]

    def _packed(self, q: mx.array, store: PackedStore, scoring: Scoring) -> mx.array:
        shape = self._shape(q, scoring, mx.float32)
        if shape not in self._coded:
            self._coded[shape] = _coded_launches(self._metadata, shape)
        coded, own = self._coded[shape]
        arrays = store.coded()
        codes = Codes(
            arrays.layout.key_bits,
            shape.block_tokens // arrays.keys[1].shape[-1],
            arrays.layout.value_bits,
            shape.value_dim // arrays.values[1].shape[-1],
        )
        turned = store.transform(q)
        blocks = [*arrays.keys, *arrays.values]
        found = attend(self._target, turned, blocks, coded, scoring, shape, codes)
        as_written = attend(self._target, q, store.tail_arrays(), own, scoring, shape)
        of_codes, of_tail = merge(self._target, found, as_written, scoring.sinks, shape)
        return (store.inverse_transform(of_codes) + of_tail).astype(q.dtype)

    def _shape(self, q: mx.array, scoring: Scoring, dtype: mx.Dtype) -> Shape:
        spec = self._metadata.spec
        return Shape(
            dtype,
            spec.head_dim,
            spec.value_dim,
            spec.head_dim if spec.value_in_key else spec.value_dim,
            spec.kv_heads,
            q.shape[1] // spec.kv_heads,
            self._metadata.block_tokens,
            scoring.softcap is not None,
            scoring.sinks is not None,
        )


def _launch(metadata: AttentionMetadata, shape: Shape) -> Launch:
    """All rows, those of a sequence in tiles; none counts as a prompt."""
    (part,) = cut(metadata, metadata.rows, shape.rows, shape.rows)
    splits = shape.splits(len(part.tiles))
    return Launch.of(part.tiles, metadata.block_table, part.visible, splits)


def _coded_launches(metadata: AttentionMetadata, shape: Shape) -> tuple[Launch, Launch]:
    """Single rows: what each reads coded, and its own block as written."""
    assert metadata.tails is not None, "the format keeps no tails"
    size, rows = metadata.block_tokens, np.arange(metadata.rows, dtype=np.int32)
    own = metadata.keys // size * size  # where the row's own block begins
    first, last = metadata.first_visible, metadata.last_visible
    visible = np.stack([first, last], axis=1)
    coded = _tiles(rows, first, own, metadata.table_starts[:-1] - metadata.first_blocks)
    tail = _tiles(rows, np.maximum(first, own), last + 1, rows - own // size)
    splits = shape.splits(metadata.rows)
    return (
        Launch.of(coded, metadata.block_table, visible, splits),
        Launch.of(tail, metadata.tails, visible, 1),
    )


def _tiles(rows: Ints, low: Ints, high: Ints, places: Ints) -> Ints:
    """A tile for each row; fields as `tiles.Part` has them."""
    tiles = np.zeros((len(rows), TILE_FIELDS), np.int32)
    tiles[:, :5] = np.stack([rows, np.ones_like(rows), low, high, places], axis=1)
    return tiles
