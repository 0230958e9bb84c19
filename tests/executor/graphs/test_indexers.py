"""The kernels by which indexers choose keys, held against MLX's way."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from quire.attention.choice import IndexerTopK
from quire.attention.metadata import build_metadata
from quire.cache.specs import FullKV
from quire.core.kv_format import KVFormat
from quire.executor.graphs.attention.chosen_keys import kernel_source
from quire.executor.graphs.recorder import Kernel
from tests.attention.rows import HandRows
from tests.support.emulated_metal import guarded, why_not
from tests.support.emulated_steps import launch
from tests.support.nvrtc import assert_compiles

LIMIT, ROOM, BLOCK, CAPACITY, THREADS = 40, 64, 64, 512, 512
AS_PUBLISHED = {"LIMIT": 2048, "ROOM": 2048, "BLOCK": 64, "CAPACITY": 1 << 16, "THREADS": 128}
SOURCES = {
    "store_rows": ["const __nv_bfloat16* k", "const int* blocks", "const int* offsets"],
    "index_scores": ["const __nv_bfloat16* q", "const float* weights"],
    "choose": ["const float* scores", "const int* tiles", "int* chosen", "int* found"],
    "gather": ["const int* found", "const int* chosen"],
}
OF_KEYS = ["const int* tiles", "const int* table", "const __nv_bfloat16* keys"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_sources_compile(name: str, tmp_path: Path) -> None:
    more = {
        "store_rows": ["__nv_bfloat16* keys"],
        "index_scores": [*OF_KEYS, "float* scores"],
        "gather": [*OF_KEYS, "__nv_bfloat16* to"],
    }.get(name, [])
    constants = AS_PUBLISHED | {"HEADS": 64, "DIM": 576 if name == "gather" else 128}
    text = kernel_source(name, [*SOURCES[name], *more], constants, constants["THREADS"])
    assert_compiles(text, tmp_path, spilled=64)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_rows_choose_their_best_keys_and_of_equal_ones_the_first() -> None:
    """Rows with fewer keys than the limit, as many, one more and many more; the third's scores are
    all equal but for a few, zeros of both signs among them."""
    counts = [7, LIMIT, LIMIT + 1, 300, 500]
    random = np.random.default_rng(0)
    scores = np.zeros((8, CAPACITY), np.float32)
    for row, count in enumerate(counts):
        scores[row, :count] = random.normal(size=count).round(1)
    scores[3, :300:2], scores[3, 1:200:2] = 0.0, -0.0
    tiles = np.zeros((8, 6), np.int32)
    tiles[: len(counts), 3] = counts
    rows, chosen = np.array([len(counts)], np.int32), np.full((8, LIMIT), -1, np.int32)
    found = np.full((8, 6), -1, np.int32)
    constants = {"LIMIT": LIMIT, "ROOM": ROOM, "BLOCK": BLOCK, "CAPACITY": CAPACITY}
    text = kernel_source("choose", SOURCES["choose"], constants | {"THREADS": THREADS}, THREADS)
    kept = [guarded(each) for each in (rows, scores, tiles, chosen, found)]
    addresses = tuple(int(each.ctypes.data) for each in kept)
    launch(Kernel(text, (8, 1, 1), THREADS, 0, addresses, ()))
    chosen, found = kept[3], kept[4]
    np.testing.assert_array_equal(found[:5, 3], np.minimum(counts, LIMIT))
    np.testing.assert_array_equal(found[5:, 3], 0)
    np.testing.assert_array_equal(found[:5, 4], np.arange(5) * ROOM // BLOCK)
    sequence = HandRows(0, 1, KVFormat(), (range(1),))
    best = IndexerTopK(build_metadata(0, FullKV(1, 64), [sequence], BLOCK), LIMIT)
    for row, count in enumerate(counts):
        if count <= LIMIT:
            np.testing.assert_array_equal(chosen[row, :count], np.arange(count))
            continue
        expected = best._highest(mx.array(scores[row : row + 1, :count]))
        np.testing.assert_array_equal(chosen[row], np.array(expected)[0])
