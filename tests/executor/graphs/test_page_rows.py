"""Several rows of a sequence over page codes as recorded steps compute them, emulated."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.cache.specs import FullKV, WindowKV
from quire.core.kv_format import KVFormat
from tests.executor.graphs.layers import HeldLayer, worst_of_rows
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


HEADS, KV_HEADS = 4, 2
SCALE = 0.125


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
    layer = HeldLayer(spec, KVFormat("page", *bits), TABLES, blocks=5, tails=2)
    given: dict[str, list[list[mx.array]]] = {name: [[] for _ in TABLES] for name in "qkv"}
    found: list[list[mx.array]] = [[] for _ in TABLES]
    reached = [0] * len(TABLES)
    for number, counts in enumerate(STEPS):
        projected = layer.projected(sum(counts), HEADS, number)
        seen = layer.attended(layer.metadata(reached, counts), projected, SCALE)
        first = 0
        for sequence, count in enumerate(counts):
            part = slice(first, first + count)
            for name, array in projected.items():
                given[name][sequence].append(array[part])
            found[sequence].append(seen[part])
            first, reached[sequence] = first + count, reached[sequence] + count
    whole = {name: _joined(parts) for name, parts in given.items()}
    wanted = layer.expected(layer.metadata([0] * len(TABLES), reached), whole, SCALE)
    assert worst_of_rows(_joined(found), wanted) < 1e-2
    assert_blocks_are_alike(layer, reached)


def assert_blocks_are_alike(layer: HeldLayer, lengths: list[int]) -> None:
    """Full ones as they read, and what tails hold."""
    store, expected = layer.ours, layer.theirs
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
