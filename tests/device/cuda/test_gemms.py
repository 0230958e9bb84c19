"""Products of few and of many rows, run on the CPU and held against float32."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from quire.device.cuda.driver import Card
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.cuda.wide_gemm import WideGemm
from quire.executor.graphs import kernels
from quire.executor.graphs.recorder import Kernel
from tests.device.cuda.cards import CARDS, H200
from tests.support.emulated_steps import EmulatedRunner

SMALL = Card(2, 227 << 10)
"""A card that so few thread blocks fill that warps stand side by side."""


def matrix(outputs: int, inputs: int, bits: int, group: int, seed: int) -> list[mx.array]:
    """Return a matrix as a kernel takes it, and then its numbers in float32."""
    whole = mx.random.normal((outputs, inputs), key=mx.random.key(seed)) * inputs**-0.5
    whole = whole.astype(mx.bfloat16)
    if bits == 16:
        return [whole, whole.astype(mx.float32)]
    parts = mx.quantize(whole, group_size=group, bits=bits)
    wide = [parts[0], *(each.astype(mx.float32) for each in parts[1:])]
    return [*parts, mx.dequantize(*wide, group_size=group, bits=bits)]


def run(source: str, gemm: kernels.Gemm, given: list[mx.array], grid: tuple[int, int, int]) -> None:
    runner = EmulatedRunner()
    addresses = tuple(runner.address(each) for each in given)
    runner.run(Kernel(source, grid, gemm.threads, gemm.shared, addresses, ()))


def error(found: mx.array, expected: mx.array) -> float:
    difference = mx.linalg.norm(found.astype(mx.float32) - expected)
    return float((difference / mx.linalg.norm(expected)).item())


@pytest.mark.parametrize("card", [H200, SMALL], ids=["split", "side by side"])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 128), (8, 64), (16, 0)])
def test_products_are_those_of_the_weights(bits: int, group: int, card: Card) -> None:
    rows, inputs, outputs = 70, 384, 144
    *weight, numbers = matrix(outputs, inputs, bits, group, 0)
    x = mx.random.normal((rows, inputs), key=mx.random.key(1)).astype(mx.bfloat16)
    y, offsets = mx.zeros((rows, outputs), mx.bfloat16), mx.arange(outputs).astype(mx.bfloat16)
    gemm = WideGemm(inputs, outputs, bits, group or 64, 128, card)
    assert (gemm.columns > 1) == (card is SMALL)
    source = kernels.linear(gemm, (outputs,), offsets=True)
    count = mx.array(np.array([rows], np.int32))
    grid = sum(kernels.parts(gemm, (outputs,))), gemm.blocks, 1
    run(source, gemm, [count, x, *weight, y, offsets], grid)
    assert error(y, x.astype(mx.float32) @ numbers.T + offsets.astype(mx.float32)) < 4e-3


@pytest.mark.parametrize("inputs", [192, 1024])
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_products_of_few_rows_are_those_of_the_weights(bits: int, rows: int, inputs: int) -> None:
    outputs = 48
    *weight, numbers = matrix(outputs, inputs, bits, 64, 0)
    x = mx.random.normal((rows, inputs), key=mx.random.key(1)).astype(mx.bfloat16)
    y = mx.zeros((rows, outputs), mx.bfloat16)
    gemm = SkinnyGemm(inputs, outputs, 64, 1 << (rows - 1).bit_length(), H200, bits=bits)
    grid = sum(kernels.parts(gemm, (outputs,))), gemm.blocks, 1
    count = mx.array(np.array([rows], np.int32))
    source = kernels.linear(gemm, (outputs,), offsets=False)
    run(source, gemm, [count, x, *weight, y], grid)
    assert error(y, x.astype(mx.float32) @ numbers.T) < 4e-3


@pytest.mark.parametrize("bits", [4, 16])
def test_gates_join_two_products(bits: int) -> None:
    rows, inputs, outputs = 5, 128, 48
    (*gate, a), (*up, b) = (matrix(outputs, inputs, bits, 64, seed) for seed in (0, 1))
    x = mx.random.normal((rows, inputs), key=mx.random.key(2)).astype(mx.bfloat16)
    y = mx.zeros((rows, outputs), mx.bfloat16)
    gemm = WideGemm(inputs, outputs, bits, 64, 64, SMALL, gated=True)
    grid = -(-outputs // gemm.width), gemm.blocks, 1
    count = mx.array(np.array([rows], np.int32))
    run(kernels.gated(gemm, "silu"), gemm, [count, x, *gate, *up, y], grid)
    left, right = (x.astype(mx.float32) @ each.T for each in (a, b))
    assert error(y, left * mx.sigmoid(left) * right) < 5e-3


def test_experts_take_the_rows_that_chose_them() -> None:
    rows, top, inputs, outputs, count = 6, 2, 128, 64, 3
    made = [matrix(outputs, inputs, 4, 64, seed) for seed in range(count)]
    codes, scales, biases, numbers = (mx.stack(list(part)) for part in zip(*made, strict=True))
    x = mx.random.normal((rows * top, inputs), key=mx.random.key(9)).astype(mx.bfloat16)
    chosen = np.array([[0, 2], [2, 0], [2, 0], [0, 2], [2, 0], [2, 0]])
    order = np.argsort(chosen.reshape(-1), kind="stable").astype(np.int32)
    tiles = np.array([[0, 0, 6], [2, 6, 6], [0, 0, 0]], np.int32)
    y = mx.zeros((rows * top, outputs), mx.bfloat16)
    gemm = WideGemm(inputs, outputs, 4, 64, 64 * len(tiles), H200, experts=True)
    grid = -(-outputs // gemm.width), len(tiles), 1
    arrays = [x, codes, scales, biases, mx.array(order), mx.array(tiles), y]
    run(kernels.experts_down(gemm, count), gemm, arrays, grid)
    own = numbers[mx.array(chosen.reshape(-1)[order])]
    expected = (own @ x.astype(mx.float32)[..., None]).squeeze(-1)
    assert error(y[mx.array(order)], expected) < 4e-3


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_what_a_thread_block_keeps_fits_the_card(card: Card) -> None:
    for bits in (4, 8, 16):
        for outputs in (16, 128, 4096, 28_672):
            for gated in (False, True):
                gemm = WideGemm(4096, outputs, bits, 64, 512, card, gated)
                assert gemm.fits, gemm
                assert gemm.width * -(-outputs // gemm.width) >= outputs
