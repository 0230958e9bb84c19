"""A layer as one compiled operation gives the same bits as its operations one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.device.activations import SPELLED_OUT, Gating, gated
from quire.device.cpu.kernels import load_kernels
from quire.device.cpu.operations import KernelOperations
from quire.device.operations import Operations
from quire.device.weights import GatedMatrices, HeadPart, Matrix, PackedWeight, Packing, in_tiles

HIDDEN, WIDTH, DIM = 128, 192, 32


@pytest.fixture
def operations(compiled: Any) -> KernelOperations:
    return KernelOperations(load_kernels(threads=1))


def drawn(*shape: int, seed: int = 0) -> mx.array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return mx.array(values.astype(np.float32))


def floats(columns: int, depth: int, seed: int) -> Matrix:
    return Matrix(drawn(columns, depth, seed=seed), drawn(columns, seed=seed + 1))


def narrow(columns: int, depth: int, seed: int) -> Matrix:
    return Matrix(drawn(columns, depth, seed=seed).astype(mx.bfloat16), None)


def codes(columns: int, depth: int, seed: int) -> Matrix:
    parts = mx.quantize(drawn(columns, depth, seed=seed), group_size=64, bits=8)
    return Matrix(PackedWeight(*parts, Packing(64, 8, "affine")), drawn(columns, seed=seed + 1))


def tiles(columns: int, depth: int, seed: int) -> Matrix:
    parts = mx.quantize(drawn(columns, depth, seed=seed), group_size=64, bits=4)
    packing = Packing(64, 4, "affine")
    reads = KernelOperations(load_kernels(threads=1)).reads_tiles(packing)
    laid = [in_tiles(each) if reads else each for each in parts]
    return Matrix(PackedWeight(*laid, packing, tiled=reads), None)


Make = Callable[[int, int, int], Matrix]
KINDS: list[Make] = [floats, narrow, codes, tiles]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_a_gated_mlp(operations: KernelOperations, make: Make, activation: str) -> None:
    gate, up = make(WIDTH, HIDDEN, 1), make(WIDTH, HIDDEN, 3)
    # The last one is stored otherwise: its rows are arranged for themselves.
    for down in (make(HIDDEN, WIDTH, 5), floats(HIDDEN, WIDTH, 5)):
        for rows in (1, 20):
            x = drawn(rows, HIDDEN)
            gates, ups = operations.product(x, gate), operations.product(x, up)
            inner = operations.gated(Gating(activation), gates, ups)
            y = operations.gated_mlp(x, GatedMatrices(gate, up, down, Gating(activation)))
            assert mx.array_equal(y, operations.product(inner, down))


@pytest.mark.parametrize("gating", [Gating("relu2"), Gating("silu", 7.0), Gating("silu", 7.0, 1.7)])
def test_other_gates_are_computed_by_mlx(operations: KernelOperations, gating: Gating) -> None:
    matrix, x = floats(HIDDEN, HIDDEN, 1), drawn(3, HIDDEN)
    y = operations.gated_mlp(x, GatedMatrices(matrix, matrix, matrix, gating))
    inner = operations.product(x, matrix)
    expected = gated(gating, SPELLED_OUT[gating.activation], inner, inner)
    assert mx.array_equal(y, operations.product(expected, matrix))


@pytest.mark.parametrize("make", KINDS)
def test_heads(operations: KernelOperations, make: Make) -> None:
    norm = drawn(DIM, seed=9)
    parts = (
        HeadPart(make(4 * DIM, HIDDEN, 1), 4, norm, normed=True, rotated=True),
        HeadPart(make(2 * DIM, HIDDEN, 3), 2, normed=True, rotated=True),
        HeadPart(None, 2, normed=True),  # of the product before
        HeadPart(floats(2 * DIM, HIDDEN, 5), 2),
    )
    for rows in (1, 20):
        x, angles = drawn(rows, HIDDEN), 10 * drawn(rows, DIM // 4, seed=7)
        for neighbours in (True, False):
            turn = operations.rotation(mx.cos(angles), mx.sin(angles), neighbours)
            for rotate in (turn, None):
                found = operations.heads(x, parts, 1e-6, rotate)
                expected = Operations.heads(operations, x, parts, 1e-6, rotate)
                assert [each.shape for each in found] == [each.shape for each in expected]
                pairs = zip(found, expected, strict=True)
                assert all(mx.array_equal(ours, apart) for ours, apart in pairs)


def test_heads_that_turn_otherwise_are_spelled_out(operations: KernelOperations) -> None:
    parts = (HeadPart(floats(2 * DIM, HIDDEN, 1), 2, rotated=True),)
    x = drawn(3, HIDDEN)
    (doubled,) = operations.heads(x, parts, 1e-6, lambda y: 2 * y)
    (plain,) = operations.heads(x, parts, 1e-6, None)
    assert mx.array_equal(doubled, 2 * plain)


def test_a_norm_with_a_narrow_weight(operations: KernelOperations) -> None:
    x, weight = drawn(3, HIDDEN), drawn(HIDDEN, seed=1).astype(mx.bfloat16)
    y = operations.rms_norm(x, weight, 1e-6)
    assert y.dtype == mx.float32
    wanted = operations.rms_norm(x, weight.astype(mx.float32), 1e-6)
    assert mx.allclose(y, wanted, rtol=1e-6, atol=1e-6)
