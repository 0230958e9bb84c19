"""The backend of the portable kernels, for generating rows on Metal."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import ClassVar

import mlx.core as mx

from quire.attention.backend import AttentionCase, PreparedAttention, Scoring
from quire.attention.metadata import AttentionMetadata
from quire.attention.paged.checked import SAMPLE, CheckedBackend
from quire.attention.paged.portable_kernels import (
    LONGEST,
    Codes,
    Launch,
    Shape,
    attend,
    coded_value_size,
    merge,
)
from quire.attention.paged.target import Target
from quire.attention.paged.tiles import FEW_ROWS, cut
from quire.cache.formats.base import CodedLayout, LayerStore, PackedStore, WrittenBlocks
from quire.device.coding import VectorRotation

_MOST_GROUP = 32
"""Most query heads per KV head: with more, products take longer than reads."""


class PortableBackend(CheckedBackend):
    """Supports generating rows over plain blocks of any floating type, and over codes.

    Prompts are left to MLX's own products.

    Args:
        target: the language that kernels are compiled to.
        plain_dtypes: types of queries over plain blocks; over codes any type is supported.
    """

    sample: ClassVar = replace(SAMPLE, heads=4, dtype=mx.float32)

    def __init__(self, target: Target, plain_dtypes: Iterable[mx.Dtype]) -> None:
        self.name = f"portable paged attention ({target.name})"
        self._target = target
        self._plain_dtypes = tuple(plain_dtypes)
        self._signs = SignsOfStores()

    def made_for(self, case: AttentionCase) -> bool:
        spec = case.spec
        plain = case.format.scheme == "plain"
        return (
            (case.dtype in self._plain_dtypes if plain else _reads_codes(case))
            and case.rows <= FEW_ROWS
            and max(spec.head_dim, spec.value_dim) <= LONGEST
            and case.heads // spec.kv_heads <= _MOST_GROUP
        )

    def prepare(self, metadata: AttentionMetadata) -> PreparedAttention:
        return _Prepared(self._target, metadata, self._signs)


def _reads_codes(case: AttentionCase) -> bool:
    """Return whether the kernels can read the case's codes.

    A format with a tail is read for one row a sequence: of several rows, later ones would need
    blocks that earlier ones of the same step have written.
    """
    if not case.format.has_tail:
        return True
    tailed = case.spec.attention is not None  # blocks of media have no tails
    return tailed and case.rows == 1 and case.spec.value_dim % 32 == 0


@dataclass(frozen=True, slots=True)
class _Signs:
    """The signs by which the kernels rotate a store's vectors; None where MLX rotates them.

    Attributes:
        key_scale: see `VectorRotation`; for values the signs include it.
    """

    keys: mx.array | None
    key_scale: float
    values: mx.array | None

    @staticmethod
    def of(store: PackedStore) -> _Signs:
        layout = store.coded().layout
        keys = _hadamard(layout.key_rotation, store.shape.head_dim)
        values = _hadamard(layout.value_rotation, store.shape.value_dim)
        return _Signs(
            None if keys is None else keys.map,
            1.0 if keys is None else keys.scale,
            None if values is None else values.map * values.scale,
        )


def _hadamard(turn: VectorRotation | None, size: int) -> VectorRotation | None:
    """Return a turn by signs and a Hadamard transform of vectors that are not padded for it."""
    return turn if turn is not None and turn.map.shape == (size,) else None


class SignsOfStores:
    """The signs of each store, made once."""

    def __init__(self) -> None:
        self._made: dict[CodedLayout, _Signs] = {}

    def of(self, store: PackedStore) -> _Signs:
        """Return the signs of a store."""
        layout = store.coded().layout
        if layout not in self._made:
            self._made[layout] = _Signs.of(store)
        return self._made[layout]


class _Prepared(PreparedAttention):
    """A step's rows on the device. They are cut when the first layer gives the number of query
    heads.
    """

    def __init__(self, target: Target, metadata: AttentionMetadata, signs: SignsOfStores) -> None:
        self._target = target
        self._metadata = metadata
        self._signs = signs
        self._launches: dict[Shape, Launch] = {}
        self._tailed: dict[Shape, tuple[Launch, Launch]] = {}

    def forward(
        self, q: mx.array, store: LayerStore, written: WrittenBlocks | None, scoring: Scoring
    ) -> mx.array:
        if store.packed is not None:
            return self._packed(q, store.packed, scoring)
        shape = self._plain_shape(q, scoring)
        keys, *values = store.arrays()
        blocks = [keys, values[0] if values else keys]
        found = attend(
            self._target, q, blocks, launch=self._rows(shape), scoring=scoring, shape=shape
        )
        return merge(self._target, found, [], sinks=scoring.sinks, shape=shape)[0]

    def rehearse(self, q: mx.array, store: LayerStore, scoring: Scoring) -> None:
        if store.packed is not None:
            super().rehearse(q, store, scoring)
        else:
            self._rows(self._plain_shape(q, scoring))

    def _plain_shape(self, q: mx.array, scoring: Scoring) -> Shape:
        """Return the shape of kernels over plain blocks."""
        spec = self._metadata.spec
        stride = spec.head_dim if spec.value_in_key else spec.value_dim
        return self._shape(q, scoring, spec.value_dim, value_stride=stride, dtype=q.dtype)

    def _packed(self, q: mx.array, store: PackedStore, scoring: Scoring) -> mx.array:
        arrays, signs = store.coded(), self._signs.of(store)
        codes, size = Codes.of(arrays), coded_value_size(arrays)
        # Without signs MLX turns queries and results, or pads and cuts them.
        turned, own = q, scoring
        if signs.keys is None:
            turned = store.transform(q.astype(mx.float32) if arrays.layout.key_rotation else q)
        else:
            own = scoring._replace(scale=scoring.scale * signs.key_scale)
        done = not store.has_tail and (signs.values is not None or not arrays.layout.value_rotation)
        shape = self._shape(
            turned, scoring, size, value_stride=size, dtype=q.dtype if done else mx.float32
        )
        rows, tail = self._coded_rows(shape) if store.has_tail else (self._rows(shape), None)
        blocks = [*arrays.keys, *arrays.values]
        found = attend(
            self._target,
            turned,
            blocks,
            launch=rows,
            scoring=own,
            shape=shape,
            codes=codes,
            signs=signs.keys,
        )
        as_written: list[mx.array] = []
        if tail is not None:
            as_written = attend(
                self._target, q, store.tail_arrays(), launch=tail, scoring=scoring, shape=shape
            )
        outs = merge(
            self._target, found, as_written, sinks=scoring.sinks, shape=shape, signs=signs.values
        )
        if signs.values is None:
            outs[0] = store.inverse_transform(outs[0])
        return sum(outs[1:], outs[0]).astype(q.dtype)

    def _coded_rows(self, shape: Shape) -> tuple[Launch, Launch]:
        """Return the launches of single rows over codes, and over their own uncoded blocks."""
        if shape not in self._tailed:
            self._tailed[shape] = _tailed_launches(self._metadata, shape)
        return self._tailed[shape]

    def _rows(self, shape: Shape) -> Launch:
        """Return the launch of all rows, made once for equal layers."""
        if shape not in self._launches:
            self._launches[shape] = _launch(self._metadata, shape)
        return self._launches[shape]

    def _shape(
        self, q: mx.array, scoring: Scoring, value_dim: int, value_stride: int, dtype: mx.Dtype
    ) -> Shape:
        told = self._metadata
        _, heads, key_dim = q.shape
        return Shape(
            dtype,
            key_dim,
            value_dim,
            value_stride=value_stride,
            kv_heads=told.spec.kv_heads,
            group=heads // told.spec.kv_heads,
            block_size=told.block_size,
            capped=scoring.softcap is not None,
            sinks=scoring.sinks is not None,
            several=told.rows > told.sequences,
        )


def _launch(metadata: AttentionMetadata, shape: Shape) -> Launch:
    """Return the launch of all rows, in tiles of one sequence; none counts as a prompt."""
    if metadata.rows == metadata.sequences:
        return _single_rows(metadata, shape)
    (part,) = cut(metadata, metadata.rows, shape.rows, rows_many=shape.rows)
    splits = shape.splits(len(part.tiles))
    tiles, visible = part.tiles.ravel(), part.visible.ravel()
    return Launch.of(tiles, metadata.block_table, visible, splits=splits)


def _single_rows(metadata: AttentionMetadata, shape: Shape) -> Launch:
    """Return the launch of sequences of one row each."""
    first, last = metadata.first_visible.tolist(), metadata.last_visible.tolist()
    tiles = _tiles(first, _ends(last), places=_places(metadata))
    splits = shape.splits(metadata.rows)
    return Launch.of(tiles, metadata.block_table, _visible(first, last), splits=splits)


def _tailed_launches(metadata: AttentionMetadata, shape: Shape) -> tuple[Launch, Launch]:
    """Return the two launches for single rows: over coded blocks, and over the rows' own uncoded
    blocks.
    """
    assert metadata.tails is not None, "the format keeps no tails"
    size = metadata.block_size
    first, last = metadata.first_visible.tolist(), metadata.last_visible.tolist()
    own = [key // size * size for key in metadata.keys.tolist()]  # where the row's own block starts
    visible = _visible(first, last)
    coded = _tiles(first, own, places=_places(metadata))
    tails = [row - start // size for row, start in enumerate(own)]
    tail = _tiles(list(map(max, first, own)), _ends(last), places=tails)
    splits = shape.splits(metadata.rows)
    return (
        Launch.of(coded, metadata.block_table, visible, splits=splits),
        Launch.of(tail, metadata.tails, visible, splits=1),
    )


def _places(metadata: AttentionMetadata) -> list[int]:
    """Return where block 0 of each sequence would stand in the table."""
    pairs = zip(metadata.table_starts.tolist(), metadata.first_blocks.tolist(), strict=False)
    return [start - first for start, first in pairs]


def _ends(last: Sequence[int]) -> list[int]:
    """Return one past the last key that each row sees."""
    return [key + 1 for key in last]


def _visible(first: Sequence[int], last: Sequence[int]) -> array[int]:
    """Return the first and the last key that each row sees, `[T * 2]`."""
    return array("i", chain.from_iterable(zip(first, last, strict=True)))


def _tiles(low: Sequence[int], high: Sequence[int], places: Sequence[int]) -> array[int]:
    """Return a tile for each row, with the fields of `tiles.Part`, `[T * TILE_FIELDS]`."""
    count = len(low)
    fields = range(count), repeat(1, count), low, high, places, repeat(0, count)
    return array("i", chain.from_iterable(zip(*fields, strict=True)))
