"""Joined products of Apple silicon give what the operations one by one give."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from quire.device.metal.operations import MetalOperations
from quire.device.operations import Operations
from quire.device.weights import (
    HeadPart,
    JoinedMatrix,
    Matrix,
    PackedWeight,
    Packing,
    joined_by,
)

_DIM, _WIDTH = 16, 64


def _matrices(*outputs: int, bias: bool = False, joins: bool = True) -> list[Matrix]:
    mx.random.seed(1)
    whole = mx.random.normal((sum(outputs), _WIDTH))
    added = mx.random.normal((sum(outputs),)) if bias else None
    ends = [sum(outputs[: n + 1]) for n in range(len(outputs))]
    joined = JoinedMatrix(whole, added, tuple(ends)) if joins else None
    starts = [0, *ends]
    return [
        Matrix(whole[a:b], None if added is None else added[a:b], joined)
        for a, b in zip(starts, ends, strict=False)
    ]


def _rotate(x: mx.array) -> mx.array:
    return x * 2 + x[..., ::-1]


def _same(own: Sequence[mx.array], other: Sequence[mx.array]) -> None:
    assert len(own) == len(other)
    for a, b in zip(own, other, strict=True):
        assert a.shape == b.shape
        assert mx.allclose(a, b, atol=1e-5).item()


def _plain(q: Matrix, k: Matrix, v: Matrix, norms: list[mx.array]) -> list[HeadPart]:
    return [HeadPart(q, 4, rotated=True), HeadPart(k, 2, rotated=True), HeadPart(v, 2)]


def _normed(q: Matrix, k: Matrix, v: Matrix, norms: list[mx.array]) -> list[HeadPart]:
    first = HeadPart(q, 4, norms[0], normed=True, rotated=True)
    return [first, HeadPart(k, 2, norms[1], normed=True, rotated=True), HeadPart(v, 2)]


def _all_normed(q: Matrix, k: Matrix, v: Matrix, norms: list[mx.array]) -> list[HeadPart]:
    return [*_normed(q, k, v, norms)[:2], HeadPart(v, 2, normed=True)]


@pytest.mark.parametrize("kind", [_plain, _normed, _all_normed])
@pytest.mark.parametrize("rotates", [True, False])
def test_heads_are_those_of_single_products(kind: type, rotates: bool) -> None:
    x = mx.random.normal((3, _WIDTH))
    norms = [mx.random.normal((_DIM,)) for _ in range(2)]
    parts = kind(*_matrices(4 * _DIM, 2 * _DIM, 2 * _DIM, bias=True), norms)
    rotate = _rotate if rotates else None
    _same(
        MetalOperations().heads(x, parts, 1e-6, rotate),
        Operations().heads(x, parts, 1e-6, rotate),
    )


def test_values_may_be_the_keys_product() -> None:
    x = mx.random.normal((3, _WIDTH))
    norms = [mx.random.normal((_DIM,)) for _ in range(2)]
    q, k = _matrices(4 * _DIM, 2 * _DIM)
    parts = [*_normed(q, k, k, norms)[:2], HeadPart(None, 2, normed=True)]
    own = MetalOperations().heads(x, parts, 1e-6, _rotate)
    _same(own, Operations().heads(x, parts, 1e-6, _rotate))


def test_heads_of_different_sizes_are_computed_one_by_one() -> None:
    x = mx.random.normal((3, _WIDTH))
    parts = _plain(*_matrices(4 * _DIM, 2 * _DIM, 2 * 8), [])
    own = MetalOperations().heads(x, parts, 1e-6, _rotate)
    _same(own, Operations().heads(x, parts, 1e-6, _rotate))


def test_packed_matrices_are_one_product() -> None:
    x, outputs = mx.random.normal((3, _WIDTH)), (32, 16)
    dense = mx.random.normal((48, _WIDTH))
    packing = Packing(64, 4, "affine")
    codes, scales, biases = mx.quantize(dense, 64, 4)
    whole = PackedWeight(codes, scales, biases, packing)
    joined = JoinedMatrix(whole, None, (32, 48))
    own = [Matrix(whole.span(0, 32), None, joined), Matrix(whole.span(32, 48), None, joined)]
    found = MetalOperations().products(x, own)
    assert [each.shape[-1] for each in found] == list(outputs)
    _same(found, Operations().products(x, own))


def test_matrices_in_another_order_or_number_are_not_the_joined_one() -> None:
    q, k, v = _matrices(32, 16, 16)
    assert joined_by([q, k, v]) is q.joined
    assert joined_by([q, k]) is None
    assert joined_by(_matrices(32, 16, joins=False)) is None
