"""Weights are moved to one buffer of large pages, and stay the arrays that they were."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.device.weights import in_tiles

MEBIBYTE = 1 << 20


@pytest.fixture
def weights() -> list[mx.array]:
    """Return arrays of several types, of 3 MiB together."""
    codes = mx.arange(MEBIBYTE // 2, dtype=mx.uint32).reshape(512, -1)
    scales = mx.arange(MEBIBYTE // 2, dtype=mx.float32).astype(mx.bfloat16).reshape(2, 512, -1)
    arrays = [codes, scales, mx.arange(3.0), mx.array(7, dtype=mx.uint8)]
    mx.eval(arrays)
    return arrays


def addresses(arrays: list[mx.array]) -> list[int]:
    views = (np.array(each.view(mx.uint8), copy=False) for each in arrays if each.ndim)
    return [each.__array_interface__["data"][0] for each in views]


def test_weights_keep_their_numbers_and_lie_in_one_buffer(
    compiled: Any, weights: list[mx.array]
) -> None:
    before = [mx.array(np.array(each.astype(mx.float32))) for each in weights]
    compiled.move_to_large_pages(weights)
    places = addresses(weights)
    assert all(place % 64 == 0 for place in places)
    assert places[-1] - places[0] == weights[0].nbytes + weights[1].nbytes
    for each, expected in zip(weights, before, strict=True):
        assert mx.array_equal(each.astype(mx.float32), expected)


def test_memory_is_not_held_twice(compiled: Any, weights: list[mx.array]) -> None:
    held = mx.get_active_memory()
    compiled.move_to_large_pages(weights)
    assert mx.get_active_memory() < held + MEBIBYTE // 8


def test_few_weights_and_views_stay_where_they_are(compiled: Any) -> None:
    small, turned = mx.arange(16.0), mx.arange(float(MEBIBYTE)).reshape(2, -1).T
    mx.eval(small, turned)
    (before,) = addresses([small])
    compiled.move_to_large_pages([small, turned])
    assert addresses([small]) == [before]
    assert turned[1, 1].item() == MEBIBYTE // 2 + 1


def signed(columns: int, depth: int, bits: int) -> list[mx.array]:
    """Return codes with biases that follow from the scales, as GGUF's Q4_0 has them."""
    packed = mx.quantize(mx.random.normal((columns, depth)), group_size=32, bits=bits)
    scales = mx.abs(packed[1]).astype(mx.float16)
    return [packed[0], scales, scales * -(1 << (bits - 1))]


@pytest.mark.parametrize("bits", [4, 8])
def test_biases_that_follow_from_scales_are_not_read(ops: Any, bits: int) -> None:
    rows, packed = mx.random.normal((5, 128)), signed(64, 128, bits)
    packing: dict[str, Any] = {"group_size": 32, "bits": bits}
    if ops.reads_tiles(bits, "affine"):
        packed, packing["tiled"] = [in_tiles(each) for each in packed], True
    matrix = ops.Matrix(*packed, **packing)
    assert not matrix.reads_biases
    segment = ops.Segment()
    x, y = segment.given(128), segment.value(64)
    segment.products(x, [matrix], [y])
    segment.output(y, [64])
    segment.finish()
    (without,) = segment.run([rows])
    assert mx.array_equal(without, ops.product(rows, *packed, **packing))
    packed[2][0, 0] *= 2
    assert ops.Matrix(*packed, **packing).reads_biases
