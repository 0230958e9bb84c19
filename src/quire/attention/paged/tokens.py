"""Attention over codes of single tokens, on CUDA's tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import ClassVar

import mlx.core as mx
import numpy as np

from quire.attention.backend import AttentionCase, PreparedAttention, Scoring
from quire.attention.metadata import AttentionMetadata
from quire.attention.paged import cuda, portable_kernels
from quire.attention.paged.checked import SAMPLE, CheckedBackend
from quire.attention.paged.cuda import LANES, Shape
from quire.attention.paged.portable import SignsOfStores
from quire.attention.paged.portable_kernels import Codes
from quire.attention.paged.prompts import TokenPrompts
from quire.attention.paged.target import CUDA
from quire.attention.paged.tiles import FEW_ROWS, cut, score_numbers
from quire.cache.formats.base import LayerStore, PackedStore, WrittenBlocks
from quire.core.kv_format import KVFormat
from quire.device.cuda.driver import card
from quire.device.gpu_kernels import Kernel

KEYS = 64
"""Number of keys that a warp reads at a time."""


class TokensBackend(CheckedBackend):
    """Supports codes of single tokens: the uniform and turbo formats."""

    name = "attention over codes of tokens on tensor cores"
    sample: ClassVar = replace(SAMPLE, format=KVFormat("uniform", 4, 4))

    def __init__(self) -> None:
        self._signs = SignsOfStores()

    def made_for(self, case: AttentionCase) -> bool:
        return kernels_serve(case)

    def prepare(self, metadata: AttentionMetadata) -> PreparedAttention:
        return _Prepared(metadata, self._signs)


_Part = Callable[[mx.array, PackedStore, Scoring, Shape], mx.array]


class _Prepared(PreparedAttention):
    """A step's parts on the device: adjacent sequences of few rows each, or of many."""

    def __init__(self, metadata: AttentionMetadata, signs: SignsOfStores) -> None:
        self._spec, self._block_size = metadata.spec, metadata.block_size
        self._parts: list[tuple[slice, _Part]] = []
        few = metadata.counts <= FEW_ROWS
        changes = (np.flatnonzero(few[1:] != few[:-1]) + 1).tolist()
        for start, end in pairwise([0, *changes, metadata.sequences]):
            part = metadata.part(start, end)
            attend = _FewRows(part, signs).attend if few[start] else TokenPrompts(part).attend
            rows = slice(*metadata.query_starts[[start, end]].tolist())
            self._parts.append((rows, attend))

    def forward(
        self, q: mx.array, store: LayerStore, written: WrittenBlocks | None, scoring: Scoring
    ) -> mx.array:
        packed, spec = store.packed, self._spec
        assert packed is not None, "blocks hold codes"
        _, heads, dim = q.shape
        extras = scoring.softcap is not None, scoring.sinks is not None
        sizes = dim, dim, spec.kv_heads, heads // spec.kv_heads, self._block_size
        shape = Shape(q.dtype, *sizes, *extras)
        if len(self._parts) == 1:
            return self._parts[0][1](q, packed, scoring, shape)
        return mx.concatenate(
            [attend(q[rows], packed, scoring, shape) for rows, attend in self._parts]
        )


class _FewRows:
    """Sequences of few rows each, computed row by row."""

    def __init__(self, metadata: AttentionMetadata, signs: SignsOfStores) -> None:
        (part,) = cut(metadata, FEW_ROWS, 1, rows_many=1)
        self._tiles, self._table = mx.array(part.tiles), mx.array(metadata.block_table)
        self._signs = signs

    def attend(self, q: mx.array, store: PackedStore, scoring: Scoring, shape: Shape) -> mx.array:
        """Attend: rows `[T, heads, head_dim]` to outputs of the same shape."""
        arrays = store.coded()
        found = attend(
            store.transform(q.astype(mx.float32)) if arrays.layout.key_rotation else q,
            [*arrays.keys, *arrays.values],
            self._tiles,
            table=self._table,
            splits=shape.splits(len(q), card()),
            scoring=scoring,
            shape=shape,
            codes=Codes.of(arrays),
        )
        dim, extras = shape.value_dim, (shape.capped, shape.sinks)
        sizes = dim, dim, dim, shape.kv_heads, shape.group, shape.block_size
        joined = portable_kernels.Shape(q.dtype, *sizes, *extras, several=False)
        signs = self._signs.of(store).values
        return portable_kernels.merge(
            CUDA, found, [], sinks=scoring.sinks, shape=joined, signs=signs
        )[0]


def kernels_serve(case: AttentionCase) -> bool:
    """Return whether kernels support a case."""
    spec, format = case.spec, case.format
    return (
        format.scheme in ("uniform", "turbo")
        and case.dtype in cuda.TYPES
        and spec.head_dim == spec.value_dim
        and spec.value_dim in cuda.VALUE_DIMS
        and not spec.value_in_key
        and case.block_size % KEYS == 0
    )


def attend(
    q: mx.array,
    parts: list[mx.array],
    tiles: mx.array,
    table: mx.array,
    splits: int,
    scoring: Scoring,
    shape: Shape,
    codes: Codes,
) -> list[mx.array]:
    """Compute the partial results of each split, in the values' coded coordinates.

    Args:
        q: `[T, heads, head_dim]` in the keys' coordinates as coded.
        parts: those of keys, then those of values; see `CodedArrays`.
        tiles: a row each, see `tiles.Part`.
    """
    rows = q.shape[0]
    found = (rows, shape.heads, splits)
    return _kernel(shape, codes, q.dtype)(
        inputs=[q, *parts, tiles, table, score_numbers(scoring.scale, scoring.softcap)],
        grid=(rows * LANES, shape.blocks, splits),
        threadgroup=(LANES, 1, 1),
        output_shapes=[(*found, shape.value_dim), (*found, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )


def head(queries: mx.Dtype) -> str:
    """Return the declarations that precede `body`, after the constants."""
    name = "float" if queries == mx.float32 else "T"
    sources = map(cuda.source, ("tensor", "warps", "codes", "elements", "levels"))
    return "".join([f"typedef {name} Q;\n", *sources])


def body() -> str:
    """Return the kernel's body; `splits` thread blocks share a row's keys."""
    return "const int split = blockIdx.z, splits = gridDim.z;\n" + cuda.source("tokens")


def defines(shape: Shape, codes: Codes) -> dict[str, int]:
    """Return the constants of the kernel."""
    return shape.defines(1, split=True) | codes.defines()


def shared_memory(shape: Shape, codes: Codes) -> int:
    """Return the bytes that the kernel lays out."""
    share = cuda.warps_together(shape.value_dim)
    columns, own = -(-shape.part // 8), shape.value_dim // share
    k_row, v_row = own * codes.key_bits // 8, own * codes.value_bits // 8
    rows = 64 * (k_row + (16 if codes.key_bits == 8 else 0) + v_row + (8 if v_row % 16 else 16))
    groups = 1 if codes.codebook else own // codes.key_group + own // codes.value_group
    warp = max(rows + 256 * groups, 32 * columns * own)
    return 4 * warp + columns * (256 if share == 1 else 16384)


@cache
def _kernel(shape: Shape, codes: Codes, queries: mx.Dtype) -> Kernel:
    return cuda.compiled(
        f"tokens_{'f32' if queries == mx.float32 else 'own'}",
        ["q", *codes.inputs(), "tiles", "table", "numbers"],
        ["partial", "stats"],
        shape=shape,
        defines=defines(shape, codes),
        head=head(queries),
        body=body(),
        shared=shared_memory(shape, codes),
    )
