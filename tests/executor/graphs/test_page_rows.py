"""Several rows of a sequence over page codes as recorded steps compute them, emulated."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from quire.attention.backend import Scoring
from quire.attention.metadata import AttentionMetadata, build_metadata
from quire.attention.reference import ReferenceBackend
from quire.cache.formats.base import LayerShape, LayerStore
from quire.cache.formats.registry import make_store
from quire.cache.specs import AttentionSpec, FullKV, WindowKV
from quire.core.kv_format import KVFormat
from tests.attention.rows import HandRows
from tests.executor.graphs.layers import attended, code_tails
from tests.support.emulated_metal import why_not

TABLES = [(4, 0, 2), (1, 3)]
STEPS = [
    (40, 20),
    (24, 40),  # the first sequence fills its first block
    (64, 0),  # and a whole one
    (1, 4),  # the second sequence fills its first
    (11, 1),
]
"""How many rows each sequence has, step by step."""
FULL_BLOCKS = [4, 0, 1]


def rows_of(reached: Sequence[int], counts: Sequence[int], format: KVFormat) -> list[HandRows]:
    """Return the next rows of each sequence that has any in this step."""
    return [
        HandRows(start, count, format, (table,), (number,))
        for number, (start, count, table) in enumerate(zip(reached, counts, TABLES, strict=True))
        if count
    ]


HEADS, KV_HEADS = 4, 2
SCALE = 0.125


class Layer:
    """One layer on a store of its own."""

    def __init__(self, spec: AttentionSpec, format: KVFormat) -> None:
        self._spec, self._format = spec, format
        self.store = make_store(LayerShape.of(spec, 64, mx.bfloat16), format)
        self.store.resize(5, ())
        if format.has_tail:
            self.store.resize_tails(2, ())

    def metadata(self, reached: Sequence[int], counts: Sequence[int]) -> AttentionMetadata:
        return build_metadata(0, self._spec, rows_of(reached, counts, self._format), 64)

    def step(self, metadata: AttentionMetadata, projected: dict[str, mx.array]) -> mx.array:
        """Return what rows attended to."""
        coding = code_tails(self.store, self._spec)
        return attended(self.store, metadata, projected, SCALE, coding)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    ("kind", "bits", "dim"),
    [
        *((FullKV, (n, n), 64) for n in (2, 3, 4, 5, 6, 8)),
        *((WindowKV, bits, 64) for bits in ((4, 8), (8, 4), (2, 5), (3, 6))),
        *((FullKV, bits, 128) for bits in ((4, 4), (8, 8), (6, 3), (5, 2))),
        *((WindowKV, bits, 256) for bits in ((4, 8), (3, 5))),
        *((FullKV, bits, 512) for bits in ((8, 4), (6, 6))),
    ],
)
def test_rows_of_one_block_see_what_the_format_says(
    kind: type, bits: tuple[int, int], dim: int
) -> None:
    """Steps of some rows against the reference, which has all rows in one."""
    spec = kind(KV_HEADS, dim, *(() if kind is FullKV else (100,)))
    coded, expected = (Layer(spec, KVFormat("page", *bits)) for _ in range(2))
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    given: dict[str, list[list[mx.array]]] = {name: [[] for _ in TABLES] for name in heads}
    found: list[list[mx.array]] = [[] for _ in TABLES]
    reached = [0] * len(TABLES)
    for number, counts in enumerate(STEPS):
        projected = {
            name: _normal((sum(counts), own, dim), 3 * number + n)
            for n, (name, own) in enumerate(heads.items())
        }
        seen = coded.step(coded.metadata(reached, counts), projected)
        first = 0
        for sequence, count in enumerate(counts):
            part = slice(first, first + count)
            for name, array in projected.items():
                given[name][sequence].append(array[part])
            found[sequence].append(seen[part])
            first, reached[sequence] = first + count, reached[sequence] + count
    metadata = expected.metadata([0] * len(TABLES), reached)
    queries, keys, values = (_joined(given[name]) for name in heads)
    written = expected.store.write(keys, values, metadata.slots)
    scoring = Scoring(SCALE, None, None)
    prepared = ReferenceBackend().prepare(metadata)
    wanted = prepared.forward(queries, expected.store, written, scoring)
    errors = _norms(_joined(found) - wanted) / _norms(wanted)
    assert errors.max().item() < 1e-2
    assert_blocks_are_alike(coded.store, expected.store, reached)


def assert_blocks_are_alike(store: LayerStore, expected: LayerStore, lengths: list[int]) -> None:
    """Full ones as they read, and what tails hold."""
    assert store.packed is not None
    assert expected.packed is not None
    heads = store.shape.kv_heads
    rows = mx.array([block * heads + n for block in FULL_BLOCKS for n in range(heads)])[:, None]
    for own, other in zip(
        store.packed.read(rows).decoded(), expected.packed.read(rows).decoded(), strict=True
    ):
        assert mx.linalg.norm(own - other).item() < 1e-2 * mx.linalg.norm(other).item()
    for own, other in zip(store.packed.tail_arrays(), expected.packed.tail_arrays(), strict=True):
        for number, length in enumerate(lengths):
            started = slice(number * heads, (number + 1) * heads), slice(length % 64)
            assert mx.array_equal(own[started], other[started])


def _joined(parts: list[list[mx.array]]) -> mx.array:
    """Return the rows of the sequences, one behind the other."""
    return mx.concatenate([each for of_sequence in parts for each in of_sequence])


def _norms(x: mx.array) -> mx.array:
    """Return the norms of rows `[T, heads, dim]`."""
    return mx.linalg.norm(x.astype(mx.float32), axis=(1, 2))


def _normal(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(mx.bfloat16)
