"""Low-rank products of rows, each by two thin matrices of its own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.device.cuda.operations import CUDAOperations
from quire.device.operations import Operations

NUMBERS = np.array([0, 2, 1, 1, 0, 2, 2], np.int32)


def drawn(depth: int, rank: int, columns: int) -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = (7, columns), (7, depth), (3, rank, depth), (3, rank, columns)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(("depth", "rank", "columns"), [(24, 5, 40), (64, 8, 16), (33, 70, 7)])
def test_each_row_by_its_own_matrices(ops: Any, depth: int, rank: int, columns: int) -> None:
    y, x, inner, outer = drawn(depth, rank, columns)
    given = [mx.array(each) for each in (y, x, NUMBERS, inner, outer)]
    found = np.array(ops.add_low_rank(*given))
    for row, number in enumerate(NUMBERS):
        if number == 0:
            assert np.array_equal(found[row], y[row])
            continue
        wanted = y[row] + (x[row] @ inner[number].T) @ outer[number]
        assert np.allclose(found[row], wanted, rtol=1e-4, atol=1e-3)
        alone = ops.add_low_rank(*(each[row : row + 1] for each in given[:3]), *given[3:])
        assert np.array_equal(np.array(alone)[0], found[row])


def test_rows_that_cannot_be_gathered_need_no_runs() -> None:
    """As where CUDA graphs of adapters' steps are held against their program."""
    y, x, inner, outer = (mx.array(each) for each in drawn(24, 5, 40))
    operations, numbers = CUDAOperations(), mx.array(NUMBERS)
    assert not operations.gather_mm_dtypes
    found = operations.add_low_rank(y, x, numbers, inner=inner, outer=outer)
    expected = Operations().add_low_rank(y, x, numbers, inner=inner, outer=outer)
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-3).item()


def test_wider_stacks_change_no_bit(compiled: Any) -> None:
    y, x, inner, outer = (mx.array(each) for each in drawn(40, 5, 24))
    numbers = mx.array(NUMBERS)
    wider = [mx.pad(each, [(0, 0), (0, 4), (0, 0)]) for each in (inner, outer)]
    one = compiled.add_low_rank(y, x, numbers, inner, outer)
    assert mx.array_equal(one, compiled.add_low_rank(y, x, numbers, *wider))


def test_factors_that_do_not_fit_are_refused(compiled: Any) -> None:
    y, x, inner, outer = (mx.array(each) for each in drawn(24, 5, 40))
    with pytest.raises(ValueError, match="the factors do not fit the rows"):
        compiled.add_low_rank(y, x, mx.array(NUMBERS), inner, outer[..., :8])
