"""Keys and values stored in the blocks of pools."""

from __future__ import annotations

import io
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

ROWS, BLOCK = 6, 16


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_vectors_take_their_places(compiled: Any, dtype: mx.Dtype) -> None:
    pools = [mx.zeros((ROWS, BLOCK, dim), dtype=dtype) for dim in (32, 48)]
    expected = [np.zeros((ROWS, BLOCK, dim), dtype=np.float32) for dim in (32, 48)]
    rows, offsets = mx.array([[0, 1], [4, 5], [0, 1]]), mx.array([[3], [0], [15]])
    keys = mx.arange(3 * 2 * 32, dtype=mx.float32).reshape(3, 2, 32) % 100
    values = mx.arange(2 * 3 * 48, dtype=mx.float32).reshape(2, 3, 48).swapaxes(0, 1) % 100
    compiled.write_vectors(pools, [keys, values], rows, offsets)
    for pool, place, vectors in zip(pools, expected, (keys, values), strict=True):
        place[np.array(rows), np.array(offsets)] = np.array(vectors)
        assert np.array_equal(np.array(pool.astype(mx.float32)), place)


def operations(*arrays: mx.array) -> str:
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return graph.getvalue()


def test_pools_that_nobody_else_reads_stay_where_they_are(compiled: Any) -> None:
    pools = [mx.zeros((1 << 11, BLOCK, 64)) for _ in range(2)]
    mx.eval(pools)
    row, offset, vector = mx.array([[7]]), mx.array([[2]]), mx.ones((1, 1, 64))
    mx.eval(row, offset, vector)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(3):
        compiled.write_vectors(pools, [vector, 2 * vector], row, offset)
        assert operations(*pools).count("quire::write") == 1
        mx.eval(pools)
    assert mx.get_peak_memory() < before + pools[0].nbytes // 2
    assert [pool[7, 2].sum().item() for pool in pools] == [64, 128]


def test_codes_go_where_they_stay(compiled: Any) -> None:
    sizes = ((16, mx.uint32), (2, mx.float16), (2, mx.float16))
    coding = compiled.VectorCoding(128, 4, 64, None, None, 1.0, 0.0, 0)
    pools = [mx.zeros((1 << 11, BLOCK, size), dtype=dtype) for size, dtype in sizes * 2]
    keys, values = (mx.random.normal((3, 2, 128), key=mx.random.key(n)) for n in range(2))
    rows, offsets = mx.array([[0, 1], [4, 5], [0, 1]]), mx.array([[3], [0], [15]])
    mx.eval(pools, keys, values, rows, offsets)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(2):
        compiled.write_codes(pools, [keys, values], [coding, coding], rows, offsets)
        assert operations(*pools).count("quire::") == 1
        mx.eval(pools)
    assert mx.get_peak_memory() < before + pools[0].nbytes // 2
    for pool, codes in zip(pools, compiled.encode([keys, values], [coding, coding]), strict=True):
        assert mx.array_equal(pool[rows, offsets], codes)
        assert mx.sum(mx.any(pool != 0, axis=-1)).item() == 6


def test_who_reads_a_pool_as_it_was_keeps_it(compiled: Any) -> None:
    pool = mx.zeros((2, BLOCK, 32))
    mx.eval(pool)
    before = pool + 0
    compiled.write_vectors([pool], [mx.ones((1, 1, 32))], mx.array([[1]]), mx.array([[0]]))
    mx.eval(pool, before)
    assert (before.sum().item(), pool.sum().item()) == (0, 32)


def test_rows_of_any_shape(compiled: Any) -> None:
    pool = mx.zeros((4, 2, 3, 5), dtype=mx.bfloat16)
    values = mx.arange(60, dtype=mx.float32).reshape(2, 2, 3, 5)
    compiled.write_rows(pool, values, mx.array([3, 1]))
    assert mx.array_equal(pool[mx.array([3, 1])], values)
    assert pool[mx.array([0, 2])].sum().item() == 0
    with pytest.raises(ValueError, match="as the pool's rows"):
        compiled.write_rows(pool, values[:1], mx.array([3, 1]))


def test_rows_are_copied_in_place_from_what_they_were(compiled: Any) -> None:
    pools = [mx.zeros((1 << 11, BLOCK, 64)) + mx.arange(1 << 11)[:, None, None] for _ in range(2)]
    row, offset, vector = mx.array([[7]]), mx.array([[2]]), mx.ones((1, 1, 64))
    mx.eval(pools, row, offset, vector)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    sources, targets = mx.array([3, 5]), mx.array([5, 9])
    mx.eval(sources, targets)
    for pool in pools:
        compiled.copy_rows(pool, sources, targets)
    compiled.write_vectors(pools, [vector, vector], row, offset)  # as the step after it does
    mx.eval(pools)
    assert mx.get_peak_memory() < before + pools[0].nbytes // 2
    for pool in pools:
        assert [pool[at, 2, 0].item() for at in (3, 5, 7, 9)] == [3, 3, 1, 5]
    with pytest.raises(ValueError, match="int32"):
        compiled.copy_rows(pools[0], mx.array([3, 5]), mx.array([5]))


def test_few_rows_of_a_pool_that_is_there_are_copied_by_the_call(compiled: Any) -> None:
    small, large = (mx.zeros((rows, 4)) + mx.arange(rows)[:, None] for rows in (8, 1 << 19))
    mx.eval(small, large)
    few, many = mx.array([3, 5]), mx.arange(1 << 18)
    mx.eval(few, many)
    before = memoryview(small)
    compiled.copy_rows(small, few, few + 1)  # whose targets are still to be computed
    assert [before[at, 0] for at in (4, 6)] == [4, 6]
    mx.eval(small)
    assert [before[at, 0] for at in (4, 6)] == [3, 5]
    targets = mx.array([0, 1])
    compiled.copy_rows(small, few, targets)
    assert [before[at, 0] for at in (0, 1)] == [3, 5]
    compiled.copy_rows(large, many, many + (1 << 18))
    assert operations(large).count("quire::write") == 1


def test_rows_that_the_step_has_read_are_written_in_place(compiled: Any) -> None:
    pool = mx.zeros((1 << 12, 256))
    row = mx.array([5])
    mx.eval(pool, row)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(4):
        compiled.write_rows(pool, pool[row] + 1, row)
        mx.eval(pool)
        mx.synchronize()
    assert mx.get_peak_memory() < before + pool.nbytes // 2
    assert pool[5, 0].item() == 4
