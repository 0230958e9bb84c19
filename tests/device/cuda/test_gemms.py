"""Products of few and of many rows, run on the CPU and held against float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.device import activations
from quire.device.activations import Gating
from quire.device.cuda import driver, skinny_gemm, warpgroup_gemm
from quire.device.cuda.compiled import compiler
from quire.device.cuda.driver import Card
from quire.device.cuda.extension import load_extension
from quire.device.cuda.row_layout import RowLayout
from quire.device.cuda.skinny_gemm import SkinnyGemm, takes_digits
from quire.device.cuda.warpgroup_gemm import (
    EXPERT_TILES,
    Cut,
    WarpgroupGemm,
    copies_boxes,
    takes_interleaved,
)
from quire.device.cuda.wide_gemm import ROWS, WideGemm
from quire.device.gpu_kernels import kernel_text
from quire.device.weights import FP4, FP8, PackedWeight, Packing
from quire.executor.graphs.attention.coding_check import DeviceRunner, KernelRunner
from quire.executor.graphs.operands import UNPACKED
from quire.executor.graphs.products import product_kernels
from quire.executor.graphs.products.product_endings import ProductEnding
from quire.executor.graphs.recorder import EXPERT_TILE, Kernel, expert_tile, most_skinny_pairs
from quire.executor.graphs.rows.arithmetic import gated as joined_by
from quire.executor.graphs.source import generated_source
from tests.device.cuda.cards import CARDS, H200
from tests.support.emulated_steps import EmulatedRunner
from tests.support.everyday import everyday
from tests.support.nvrtc import assert_compiles
from tests.support.packings import BYTES_OF_32, FLOATS, FP4_OF_16, FP8_OF_128, MXFP4, OF_32, packed

SMALL = Card(2, 227 << 10)
"""A card that so few thread blocks fill that warps stand side by side."""
ONE = Card(1, 227 << 10, warpgroups=True)
"""A card on which a thread block makes several tiles of experts."""
AFFINE, BYTES = Packing(64, 4, "affine"), Packing(64, 8, "affine")
GROUPS_OF_32 = [OF_32, BYTES_OF_32]
DIGIT_WORDS = RowLayout.DIGITS.bytes // 4
_TINY = 2.0**-50
"""Numbers below this need not be exact."""
PACKINGS = [AFFINE, Packing(128, 4, "affine"), BYTES, UNPACKED, *FLOATS, *GROUPS_OF_32]
CUTS = [Cut(*shape) for shape in ((64, 2), (64, 1), (32, 3), (64, 4), (128, 3), (256, 2))]
GATINGS = {"silu": Gating("silu"), "clamped": Gating("silu", 7.0, 1.702)}


def name_of(case: object) -> str | None:
    if isinstance(case, Packing):
        named = f"{case.mode}-{case.bits}-{case.group_size}"
        return "bfloat16" if case == UNPACKED else named
    if isinstance(case, Card):
        return "split" if case is H200 else "side by side"
    return None


def matrix(outputs: int, inputs: int, packing: Packing, seed: int) -> list[mx.array]:
    """Return a matrix as a kernel takes it, and then its numbers in float32."""
    whole = mx.random.normal((outputs, inputs), key=mx.random.key(seed)) * inputs**-0.5
    whole = whole.astype(mx.bfloat16)
    if packing == UNPACKED:
        return [whole, whole.astype(mx.float32)]
    weight = packed(whole, packing)
    arrays = weight.codes, weight.scales, weight.biases
    return [*(each for each in arrays if each is not None), weight.unpacked(mx.float32)]


def few(inputs: int, outputs: int, packing: Packing, rows: int, **more: Any) -> SkinnyGemm:
    return SkinnyGemm(
        inputs,
        outputs,
        packing.group_size,
        1 << (rows - 1).bit_length(),
        H200,
        bits=packing.bits,
        mode=packing.mode,
        **more,
    )


def few_by_sixteen(
    inputs: int, outputs: int, packing: Packing, rows: int, **more: Any
) -> SkinnyGemm:
    return replace(few(inputs, outputs, packing, rows, **more), tile=16)


def few_by_twenty_four(
    inputs: int, outputs: int, packing: Packing, rows: int, **more: Any
) -> SkinnyGemm:
    if packing.bits != 4:
        pytest.skip("their tiles have eight pairs")
    return replace(few(inputs, outputs, packing, rows, **more), tile=24)


def many(
    inputs: int, outputs: int, packing: Packing, rows: int, card: Card = H200, **more: bool
) -> WideGemm:
    bits, group_size = packing.bits, packing.group_size
    return WideGemm(inputs, outputs, bits, group_size, rows, card, mode=packing.mode, **more)


def warpgroups(
    inputs: int, outputs: int, packing: Packing, rows: int, card: Card = H200, **more: Any
) -> WarpgroupGemm:
    bits, group_size = packing.bits, packing.group_size
    return WarpgroupGemm(inputs, outputs, bits, group_size, rows, card, mode=packing.mode, **more)


def looping(inputs: int, outputs: int, packing: Packing, rows: int, **more: Any) -> WarpgroupGemm:
    return warpgroups(inputs, outputs, packing, rows, ONE, **more)


def interleaving(
    inputs: int, outputs: int, packing: Packing, rows: int, **more: Any
) -> WarpgroupGemm:
    found = looping(inputs, outputs, packing, rows, layout=RowLayout.INTERLEAVED, **more)
    if packing.bits != 4 or packing.mode == "affine":
        pytest.skip("no such codes are unpacked so")
    return found


def interleaved(x: mx.array) -> mx.array:
    """Return rows with their columns in the order of `interleaved.cuh`."""
    groups = x.reshape(x.shape[0], -1, 4, 2, 2, 4)  # [rows, 64s, 16s, 8s, fours, columns]
    return mx.contiguous(groups.transpose(0, 1, 3, 5, 2, 4).reshape(x.shape))


@pytest.fixture
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cut:
    """Return how warpgroups' products are cut."""
    found = getattr(request, "param", CUTS[0])
    assert isinstance(found, Cut)
    monkeypatch.setattr(warpgroup_gemm, "chosen", lambda gemm: found)
    return found


def run(
    source: str,
    gemm: product_kernels.Gemm,
    given: list[mx.array],
    grid: tuple[int, int, int],
    runner: KernelRunner | None = None,
) -> None:
    runner = runner or EmulatedRunner()
    addresses = tuple(runner.address(each) for each in given)
    runner.run(Kernel(source, grid, gemm.threads, gemm.shared, addresses, ()))


def error(found: mx.array, expected: mx.array) -> float:
    difference = mx.linalg.norm(found.astype(mx.float32) - expected)
    return float((difference / mx.linalg.norm(expected)).item())


def random(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(mx.bfloat16)


STORE_DIGITS = """for (int c = threadIdx.x * 8; c < (WIDTH + 255) / 256 * 256; c += 256)
store_digits(digits_of_row(to, row, WIDTH), c, x + min(c, WIDTH - 8), c < WIDTH);"""
STORE_ALL_DIGITS = "store_all_digits(digits_of_row(to, row, WIDTH), 0, x, WIDTH);"
STORE_OWN_DIGITS = """for (int c = threadIdx.x; c < (WIDTH + 31) / 32 * 32; c += 32)
store_own_digits(digits_of_row(to, row, WIDTH), c, (float)x[min(c, WIDTH - 1)], c < WIDTH);"""


def digits_of(x: mx.array, storing: str = STORE_DIGITS) -> mx.array:
    """Return the records of rows that a function of `digits.cuh` writes."""
    rows, width = x.shape
    records = mx.zeros((width // 64 * rows * DIGIT_WORDS,), mx.uint32)
    body = ["const int row = blockIdx.x;", "x += row * WIDTH;", storing]
    functions = kernel_text("quire.device.cuda", "digits.cuh")
    parameters = ["const __nv_bfloat16* x", "uint4* to"]
    constants = {"WIDTH": width}
    source = generated_source(parameters, body, 32, constants=constants, functions=functions)
    runner = EmulatedRunner()
    given = tuple(map(runner.address, (number(rows), x, records)))
    runner.run(Kernel(source, (rows, 1, 1), 32, 0, given, ()))
    return records


def number(n: int) -> mx.array:
    return mx.array(np.array([n], np.int32))


@pytest.mark.parametrize(
    ("packing", "card"),
    everyday(
        product(PACKINGS, [H200, SMALL]),
        lambda packing, card: packing in ([AFFINE, FP4_OF_16] if card is H200 else [FP8_OF_128]),
    ),
    ids=name_of,
)
def test_products_are_those_of_the_weights(packing: Packing, card: Card) -> None:
    rows, inputs, outputs = 70, 384, 144
    *weight, numbers = matrix(outputs, inputs, packing, 0)
    x, offsets = random(rows, inputs, seed=1), mx.arange(outputs).astype(mx.bfloat16)
    y = mx.zeros((rows, outputs), mx.bfloat16)
    gemm = many(inputs, outputs, packing, 128, card)
    assert (gemm.columns > 1) == (card is SMALL)
    source = product_kernels.linear(gemm, (outputs,), offsets=True)
    grid = gemm.grid(sum(product_kernels.parts(gemm, (outputs,))))
    run(source, gemm, [number(rows), x, *weight, y, offsets], grid)
    assert error(y, x.astype(mx.float32) @ numbers.T + offsets.astype(mx.float32)) < 4e-3


NO_MAP = mx.zeros((1,))
"""In place of a map, which the emulation of `copy_box` does not read."""
ALL_CUT, MIXED = (Card(n, 227 << 10, warpgroups=True) for n in (5, 4))
"""Cards whose thread blocks have parts of tiles and middles of tiles of others; and parts of
tiles, then whole ones.
"""


@pytest.mark.parametrize(
    ("packing", "card"),
    everyday(
        product(PACKINGS, [ALL_CUT, MIXED, None]),
        lambda packing, card: (packing, card) in [(FP8_OF_128, MIXED), (FP4_OF_16, ALL_CUT)],
    ),
    ids=name_of,
)
@pytest.mark.parametrize("cut", everyday(CUTS, CUTS[:1].__contains__), ids=str, indirect=True)
def test_warpgroups_multiply_by_codes_and_numbers(
    packing: Packing, cut: Cut, card: Card | None
) -> None:
    """More steps than stages, two matrices, rows of W that are no multiple of a tile, biases."""
    rows, inputs, outputs = 70, 768, (144, 48)
    matrices = [matrix(each, inputs, packing, seed) for seed, each in enumerate(outputs)]
    x, offsets = random(rows, inputs, seed=1), [mx.arange(n).astype(mx.bfloat16) for n in outputs]
    sharing = card is not None
    gemm = warpgroups(inputs, sum(outputs), packing, 128, card or H200, sharing=sharing)
    assert gemm.stages < inputs // 64
    grid = gemm.grid(sum(product_kernels.parts(gemm, outputs)))
    sums = mx.zeros((gemm.sums(grid[0]) // 4,))
    flags = mx.zeros((gemm.flags(grid[0]),), mx.uint32)
    for _ in range(1 + sharing):  # a launch leaves the flags as they were
        found = [mx.zeros((rows, each), mx.bfloat16) for each in outputs]
        given = [number(rows), x]
        for (*weight, _), y, offset in zip(matrices, found, offsets, strict=True):
            given += [*weight, y, offset]
        given += [sums, flags] * sharing
        run(product_kernels.linear(gemm, outputs, offsets=True), gemm, given, grid)
        for (*_, numbers), y, offset in zip(matrices, found, offsets, strict=True):
            expected = x.astype(mx.float32) @ numbers.T + offset.astype(mx.float32)
            assert error(y, expected) < 4e-3
    assert not flags.any().item()


@pytest.mark.parametrize("rows", [0, 1, 65])
def test_warpgroups_are_launched_for_more_rows_than_there_are(cut: Cut, rows: int) -> None:
    """No thread block waits for one that has nothing to multiply."""
    inputs, outputs, most_rows = 256, 48, 512
    *weight, numbers = matrix(outputs, inputs, AFFINE, 0)
    x, y = random(max(rows, 1), inputs, seed=1), mx.zeros((max(rows, 1), outputs), mx.bfloat16)
    gemm = warpgroups(inputs, outputs, AFFINE, most_rows, sharing=True)
    grid = gemm.grid(sum(product_kernels.parts(gemm, (outputs,))))
    assert grid[0] > inputs // 64, "of one tile, some thread blocks have nothing"
    sums, flags = mx.zeros((gemm.sums(grid[0]) // 4,)), mx.zeros((gemm.flags(grid[0]),), mx.uint32)
    source = product_kernels.linear(gemm, (outputs,), offsets=False)
    run(source, gemm, [number(rows), x, *weight, y, sums, flags], grid)
    assert not flags.any().item()
    assert error(y[:rows], x[:rows].astype(mx.float32) @ numbers.T) < 4e-3 if rows else not y.any()


def test_rows_copied_in_boxes_are_multiplied_alike(
    monkeypatch: pytest.MonkeyPatch, cut: Cut
) -> None:
    """The bits are those of rows that threads copy; tiles may be filled in part."""
    rows, most_rows, inputs, outputs = 300, 512, 256, 144
    *weight, _ = matrix(outputs, inputs, AFFINE, 0)
    x, found = random(most_rows, inputs, seed=1), list[mx.array]()
    for fewest in (2 * most_rows, most_rows):
        monkeypatch.setattr(warpgroup_gemm, "_FEWEST_IN_BOXES", fewest)
        gemm = warpgroups(inputs, outputs, AFFINE, most_rows, sharing=True)
        assert copies_boxes(gemm) == (fewest == most_rows)
        grid = gemm.grid(sum(product_kernels.parts(gemm, (outputs,))))
        together = [
            mx.zeros((gemm.sums(grid[0]) // 4,)),
            mx.zeros((gemm.flags(grid[0]),), mx.uint32),
        ]
        found.append(mx.zeros((rows, outputs), mx.bfloat16))
        given = [number(rows), x, *weight, found[-1], *together, *[NO_MAP] * copies_boxes(gemm)]
        run(product_kernels.linear(gemm, (outputs,), offsets=False), gemm, given, grid)
    assert mx.array_equal(*found)


@pytest.mark.parametrize("rows", everyday([1, 3, 20], (3,).__contains__))
@pytest.mark.parametrize(
    ("packing", "inputs"),
    everyday(
        [
            (packing, inputs)
            for packing in [AFFINE, BYTES, UNPACKED, *FLOATS, *GROUPS_OF_32]
            for inputs in (192, 1024)
            if inputs % packing.group_size == 0
        ],
        lambda *case: case in [(AFFINE, 1024), (MXFP4, 192), (FP8_OF_128, 1024)],
    ),
    ids=name_of,
)
def test_products_of_few_rows_are_those_of_the_weights(
    packing: Packing, rows: int, inputs: int
) -> None:
    """Scales lie padded in shared memory, or not."""
    outputs = 48
    *weight, numbers = matrix(outputs, inputs, packing, 0)
    x, y = random(rows, inputs, seed=1), mx.zeros((rows, outputs), mx.bfloat16)
    gemm = few(inputs, outputs, packing, rows)
    grid = gemm.grid(sum(product_kernels.parts(gemm, (outputs,))))
    source = product_kernels.linear(gemm, (outputs,), offsets=False)
    run(source, gemm, [number(rows), x, *weight, y], grid)
    assert error(y, x.astype(mx.float32) @ numbers.T) < 4e-3


@pytest.mark.parametrize(
    "packing", everyday([AFFINE, Packing(128, 4, "affine")], (AFFINE,).__contains__), ids=name_of
)
def test_products_by_digits_are_those_of_float32(packing: Packing) -> None:
    """Whatever the numbers of a group: some alike, a large one among small ones, tiny ones, zeros,
    and numbers that are not finite, in which all outputs are not."""
    rows, outputs, inputs = 1, 64, 1280
    *weight, numbers = matrix(outputs, inputs, packing, 0)
    factors = np.ones((rows, inputs), np.float32)
    factors[:, 64:128:16] = 1000
    factors[:, 128:256] = 1e-30
    factors[:, 256:384] = 0
    factors[:, 384:] = 1 + np.arange(inputs - 384) % 7 * 0.01
    x = (random(rows, inputs, seed=1) * mx.array(factors)).astype(mx.bfloat16)
    gemm = replace(few(inputs, outputs, packing, rows), layout=RowLayout.DIGITS)
    assert takes_digits(gemm)
    source = product_kernels.linear(gemm, (outputs,), offsets=False)

    def result(x: mx.array) -> mx.array:
        y = mx.zeros((rows, outputs), mx.bfloat16)
        grid = gemm.grid(sum(product_kernels.parts(gemm, (outputs,))))
        run(source, gemm, [number(rows), digits_of(x), *weight, y], grid)
        return y

    def assert_rounded(x: mx.array, factor: float = 1.0) -> None:
        expected = x.astype(mx.float32) @ numbers.T
        found, rounded = (
            error(factor * each.astype(mx.float32), factor * expected)
            for each in (result(x), expected.astype(mx.bfloat16))
        )
        assert found < 1.02 * rounded

    assert_rounded(x)
    assert_rounded(mx.where(mx.arange(inputs) // 64 == 2, x, 0).astype(mx.bfloat16), factor=1e30)
    for endless in (float("inf"), float("nan")):
        broken = mx.where(mx.arange(inputs) == 100, endless, x).astype(mx.bfloat16)
        assert not mx.isfinite(result(broken)).any().item()


@pytest.mark.parametrize("factor", [1.0, 300.0, 2e-9])
@pytest.mark.parametrize("cut", [skinny_gemm.Cut(1, 3, 4, 1), skinny_gemm.Cut(2, 8, 2, 3)], ids=str)
def test_norms_behind_products_are_rounded_less_than_the_model_rounds(
    cut: skinny_gemm.Cut, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product adds a residual, and writes the row before the norm's factor; a gate reads it."""
    monkeypatch.setattr(skinny_gemm, "_chosen", lambda _: (1, cut))
    inputs, width, outputs, eps = 1280, 704, 192, 1e-6
    (*out, _), (*gate, a), (*up, b) = (
        matrix(*shape, AFFINE, seed)
        for seed, shape in enumerate([(width, inputs), (outputs, width), (outputs, width)])
    )
    x, residual = random(1, inputs, seed=3), random(1, width, seed=4) * factor
    weight = random(width, seed=5) + 1
    ending = ProductEnding(
        ("const T* residual", "const T* scale", "T* sums", "float* squares_to", "uint4* digits"),
        before="const float a = ends ? number(scale[n]) : 0.f;",
        loads="const float b = ends ? number(residual[n]) : 0.f;",
        elements="if (ends) put(sums[n], b + product); "
        "const float c = as_bfloat16(b + product); store_squares(squares_to, n, c, ends); "
        "store_own_digits(digits, n, c * a, ends);",
    )
    first = replace(few(inputs, width, AFFINE, 1), layout=RowLayout.DIGITS)
    second = replace(few(width, outputs, AFFINE, 1, gated=True), layout=RowLayout.DIGITS)
    sums, y = mx.zeros((1, width), mx.bfloat16), mx.zeros((1, outputs), mx.bfloat16)
    digits, squares = mx.zeros((width // 64 * DIGIT_WORDS,), mx.uint32), mx.zeros((width // 16,))
    source = product_kernels.linear(first, (width,), offsets=False, ending=ending)
    given = [number(1), digits_of(x), *out, residual, weight, sums, squares, digits]
    run(source, first, given, first.grid(-(-width // first.width)))
    source = product_kernels.gated(second, "silu", eps=eps)
    given = [number(1), digits, squares, *gate, *up, y]
    run(source, second, given, second.grid(-(-outputs // second.width)))

    def gated(rows: mx.array) -> mx.array:
        left, right = (rows.astype(mx.float32) @ each.T for each in (a, b))
        return left * mx.sigmoid(left) * right

    wide = sums.astype(mx.float32)
    normed = wide * mx.rsqrt(mx.square(wide).mean() + eps)
    rounded = normed.astype(mx.bfloat16) * weight
    expected = gated(normed * weight.astype(mx.float32))
    assert error(y, expected) < error(gated(rounded).astype(mx.bfloat16), expected)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(
    ("inputs", "cut"),
    everyday(
        [
            (2816, skinny_gemm.Cut(1, 11, 4, 1)),
            (704, skinny_gemm.Cut(1, 3, 2, 2)),
            (704, skinny_gemm.Cut(1, 3, 4, 1)),
            (2816, skinny_gemm.Cut(2, 8, 2, 3)),
            (2112, skinny_gemm.Cut(2, 9, 4, 1)),
            (8192, skinny_gemm.Cut(2, 16, 4, 2)),
        ],
        lambda inputs, cut: cut.warps in (3, 9),
    ),
    ids=str,
)
def test_digits_are_multiplied_by_warps_of_any_number(
    inputs: int, cut: skinny_gemm.Cut, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one stage all of a warp's codes are copied before it has x. A gate writes digits."""
    monkeypatch.setattr(skinny_gemm, "_chosen", lambda _: (1, cut))
    outputs = 192
    (*gate, a), (*up, b) = (matrix(outputs, inputs, AFFINE, seed) for seed in (0, 1))
    x, y = random(1, inputs, seed=2), mx.zeros((1, outputs), mx.bfloat16)
    gemm = replace(few(inputs, outputs, AFFINE, 1, gated=gated), layout=RowLayout.DIGITS)
    if not gemm.fits:
        pytest.skip("two such matrices do not fit a card")
    grid, given = gemm.grid(-(-outputs // gemm.width)), [number(1), digits_of(x), *gate]
    expected = x.astype(mx.float32) @ a.T
    if gated:
        records = mx.zeros((outputs // 64 * DIGIT_WORDS,), mx.uint32)
        source = product_kernels.gated(gemm, "silu", stores_digits=True)
        run(source, gemm, [*given, *up, y, records], grid)
        assert mx.array_equal(records.reshape(-1, 40)[:, :32], digits_of(y).reshape(-1, 40)[:, :32])
        expected = expected * mx.sigmoid(expected) * (x.astype(mx.float32) @ b.T)
    else:
        run(product_kernels.linear(gemm, (outputs,), offsets=False), gemm, [*given, y], grid)
    assert error(y, expected) < 5e-3


@pytest.mark.parametrize("storing", [STORE_ALL_DIGITS, STORE_OWN_DIGITS])
def test_whoever_writes_digits_writes_the_same(storing: str) -> None:
    """Of numbers of every size, zeros among them; with sums up to the order of additions."""
    scale = mx.power(2.0, mx.arange(320) // 16 % 5 * 20 - 40)
    x = mx.where(mx.arange(320) // 16 == 7, 0, random(2, 320, seed=1) * scale).astype(mx.bfloat16)
    expected, found = (
        np.array(digits_of(x, by)).reshape(-1, DIGIT_WORDS) for by in (STORE_DIGITS, storing)
    )
    assert expected[:, :32].any(axis=1).all()
    np.testing.assert_array_equal(found[:, :32], expected[:, :32])
    np.testing.assert_allclose(
        found[:, 32:].view(np.float32), expected[:, 32:].view(np.float32), 1e-5
    )


@pytest.mark.parametrize("kind", everyday([few, many], (few,).__contains__))
@pytest.mark.parametrize(
    "packing", everyday(FLOATS, (FP4_OF_16, FP8_OF_128).__contains__), ids=name_of
)
def test_every_float_code_is_exact(
    packing: Packing, kind: Callable[..., product_kernels.Gemm]
) -> None:
    """Rows of the identity give the numbers themselves, by scales up to 2^65; tiny ones become
    other tiny ones."""
    outputs, inputs, rows = 256, max(64, packing.group_size), 32
    generator = np.random.default_rng(0)
    codes = mx.array(generator.integers(0, 1 << 32, (outputs, inputs * packing.bits // 32), "u4"))
    count = 127 if packing.mode == "nvfp4" else 193  # of the others one is no number
    scales = np.resize(np.arange(count, dtype=np.uint8), (outputs, inputs // packing.group_size))
    if packing.bits == 8:
        codes = codes & 0x77777777  # no NaN
    if packing.mode == FP8:
        scales = generator.normal(size=scales.shape).astype(np.float32)
    weight = PackedWeight(codes, mx.array(scales), None, packing)
    if packing.mode == FP4:
        numbers = mx.random.normal(scales.shape, key=mx.random.key(0)).astype(mx.bfloat16)
        weight = replace(weight, scales=numbers)
    y, gemm = mx.zeros((rows, outputs), mx.bfloat16), kind(inputs, outputs, packing, rows)
    grid = gemm.grid(sum(product_kernels.parts(gemm, (outputs,))))
    source = product_kernels.linear(gemm, (outputs,), offsets=False)
    given = [number(rows), mx.eye(inputs)[:rows].astype(mx.bfloat16), codes, weight.scales, y]
    run(source, gemm, given, grid)
    expected = weight.unpacked(mx.bfloat16)[:, :rows].T
    tiny = mx.abs(expected) < _TINY
    assert mx.where(tiny, mx.abs(y) < _TINY, y == expected).all().item()


@pytest.mark.parametrize("group_size", everyday([32, 64, 128], (64).__eq__))
def test_warpgroups_round_integers_of_4_bits_once(group_size: int, cut: Cut) -> None:
    """Rows of the identity give code times scale plus bias, by scales from 2^-50 to 2^50."""
    outputs, inputs, rows = 256, max(64, group_size), 64
    generator = np.random.default_rng(0)
    codes = mx.array(generator.integers(0, 1 << 32, (outputs, inputs // 8), "u4"))
    shape = outputs, inputs // group_size
    powers = np.resize(np.arange(-50, 51), shape)
    scales, biases = (
        mx.array((generator.normal(size=shape) * 2.0**powers).astype(np.float32)).astype(
            mx.bfloat16
        )
        for _ in range(2)
    )
    weight = PackedWeight(codes, scales, biases, Packing(group_size, 4, "affine"))
    y = mx.zeros((rows, outputs), mx.bfloat16)
    gemm = warpgroups(inputs, outputs, weight.packing, rows)
    source = product_kernels.linear(gemm, (outputs,), offsets=False)
    grid = gemm.grid(sum(product_kernels.parts(gemm, (outputs,))))
    x = mx.eye(inputs)[:rows].astype(mx.bfloat16)
    run(source, gemm, [number(rows), x, codes, scales, biases, y], grid)
    assert mx.array_equal(y, weight.unpacked(mx.float32)[:, :rows].T.astype(mx.bfloat16))


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("rows", everyday([1, 3, 20, 70], (1, 3, 70).__contains__))
@pytest.mark.parametrize(
    "packing",
    everyday([AFFINE, UNPACKED, *FLOATS, *GROUPS_OF_32], (AFFINE,).__contains__),
    ids=name_of,
)
def test_gates_join_two_products(packing: Packing, rows: int, hopper: bool, cut: Cut) -> None:
    if hopper and rows <= 32:
        pytest.skip("of few rows there is one kernel")
    inputs, outputs = 128, 48
    (*gate, a), (*up, b) = (matrix(outputs, inputs, packing, seed) for seed in (0, 1))
    x, y = random(rows, inputs, seed=2), mx.zeros((rows, outputs), mx.bfloat16)
    gemm: product_kernels.Gemm = (
        few(inputs, outputs, packing, rows, gated=True)
        if rows <= 32
        else warpgroups(inputs, outputs, packing, 128, gated=True)
        if hopper
        else many(inputs, outputs, packing, 128, SMALL, gated=True)
    )
    grid = gemm.grid(-(-outputs // gemm.width))
    run(product_kernels.gated(gemm, "silu"), gemm, [number(rows), x, *gate, *up, y], grid)
    left, right = (x.astype(mx.float32) @ each.T for each in (a, b))
    assert error(y, left * mx.sigmoid(left) * right) < 5e-3


@pytest.mark.parametrize("inputs", [2112, 2176])
def test_thread_blocks_share_the_rows_of_a_router(inputs: int) -> None:
    rows, outputs = 40, 32
    gemm = few(inputs, outputs, AFFINE, rows)
    assert (gemm.tiles, gemm.blocks) == (1, 8)
    *weight, whole = matrix(outputs, inputs, AFFINE, 1)
    x, y = random(rows, inputs, seed=2), mx.zeros((rows, outputs), mx.bfloat16)
    source = product_kernels.linear(gemm, (outputs,), offsets=False)
    run(source, gemm, [number(rows), x, *weight, y], gemm.grid(-(-outputs // gemm.width)))
    assert error(y, x.astype(mx.float32) @ whole.T) < 5e-3


def tiles_of(chosen: np.ndarray, size: int) -> tuple[mx.array, mx.array]:
    """Return pairs of row and expert in the order of their experts, and the tiles of that order."""
    pairs = chosen.reshape(-1)
    order = np.argsort(pairs, kind="stable").astype(np.int32)
    tiles = list[list[int]]()
    for expert in np.unique(pairs):
        first, count = np.searchsorted(pairs[order], expert), (pairs == expert).sum()
        tiles += [[expert, first + n, min(size, count - n)] for n in range(0, count, size)]
    return mx.array(order), mx.array(np.array([*tiles, [0, 0, 0]], np.int32))


@pytest.mark.parametrize(
    ("kind", "cut"),
    everyday(
        [
            (many, CUTS[0]),
            (few_by_sixteen, CUTS[0]),
            (few_by_twenty_four, CUTS[0]),
            *((looping, Cut(rows, count)) for rows in EXPERT_TILES for count in (2, 4)),
            *((interleaving, Cut(rows, count)) for rows in EXPERT_TILES for count in (2, 4)),
        ],
        lambda kind, cut: (
            kind not in (looping, interleaving) or cut.rows == {looping: 16, interleaving: 64}[kind]
        ),
    ),
    indirect=["cut"],
    ids=lambda case: f"{case.rows}-{case.warpgroups}" if isinstance(case, Cut) else case.__name__,
)
@pytest.mark.parametrize("gating", everyday(GATINGS, ("clamped",).__contains__))
@pytest.mark.parametrize("rows", everyday([1, 2, 3, 20, 70], (3, 70).__contains__))
@pytest.mark.parametrize(
    "packing",
    everyday([AFFINE, UNPACKED, *FLOATS, *GROUPS_OF_32], (MXFP4,).__contains__),
    ids=name_of,
)
def test_experts_take_the_rows_that_chose_them(
    packing: Packing, rows: int, gating: str, kind: Callable[..., product_kernels.Gemm], cut: Cut
) -> None:
    """The experts' gates are computed, then their last matrices, all with biases; both read
    interleaved rows where they can. Skinny GEMMs count the thread blocks that have stored a tile.
    """
    top, width, count = 2, max(64, packing.group_size), 5
    hidden = 3 * width
    chosen = np.argsort(np.random.default_rng(rows).random((rows, count)))[:, :top]
    wide = rows * top > EXPERT_TILE * count
    if kind is not many and not wide:
        pytest.skip("of few rows there is one kernel")
    tile = {many: ROWS, few_by_sixteen: 16, few_by_twenty_four: 24}.get(kind, cut.rows)
    order, tiles = tiles_of(chosen, tile if wide else EXPERT_TILE)
    stacked = [
        [mx.stack(list(part)) for part in zip(*matrices, strict=True)]
        for seed, (outputs, inputs) in enumerate(
            [(width, hidden), (width, hidden), (hidden, width)]
        )
        for matrices in [[matrix(outputs, inputs, packing, 10 * seed + n) for n in range(count)]]
    ]
    (*gate, a), (*up, b), (*down, c) = stacked
    biases = [random(count, each.shape[1], seed=n) for n, each in enumerate((a, b, c))]
    x, inner = random(rows, hidden, seed=7), mx.zeros((rows * top, width), mx.bfloat16)
    own, made = GATINGS[gating], kind if wide else few
    size = tile * len(tiles) if wide else rows
    first = made(hidden, width, packing, size, gated=True, experts=True)
    joined = joined_by(own, "x", "y", mx.bfloat16)
    layout = RowLayout.INTERLEAVED if kind is interleaving and wide else None
    used, counts = np.array(tiles)[:, 2] > 0, isinstance(first, SkinnyGemm)
    counted = mx.concatenate([tiles.flatten(), mx.zeros(len(tiles), mx.int32)])
    source = product_kernels.experts_first(
        first,
        count,
        top,
        joined=joined,
        activation=own.activation,
        offsets=True,
        tiles=len(tiles),
        layout=layout,
        counts=counts,
    )
    given = [interleaved(x) if layout else x, *gate, *up, *biases[:2], order, counted, inner]
    grid = first.grid(-(-width // first.width), len(tiles))
    run(source, first, given, grid)
    blocks = grid[0] if counts else 0
    assert counted[tiles.size :].tolist() == [blocks * each for each in used]
    picked = mx.array(chosen.reshape(-1))[order]
    rows_of = x.astype(mx.float32)[order // top][..., None]
    left, right = (
        ((each[picked] @ rows_of).squeeze(-1) + bias.astype(mx.float32)[picked])
        for each, bias in zip((a, b), biases[:2], strict=True)
    )
    expected = activations.gated(own, lambda z: z * mx.sigmoid(z), left, right)
    assert error(inner, interleaved(expected) if layout else expected) < 1e-2

    y = mx.zeros((rows * top, hidden), mx.bfloat16)
    last = made(width, hidden, packing, size, experts=True)
    source = product_kernels.experts_down(
        last, count, offsets=True, tiles=len(tiles), counted=blocks
    )
    given = [inner, *down, biases[2], order, counted, y]
    run(source, last, given, last.grid(-(-hidden // last.width), len(tiles)))
    if layout:
        inner = inner.reshape(rows * top, -1, 2, 4, 4, 2).transpose(0, 1, 4, 2, 5, 3)
        inner = inner.reshape(rows * top, width)
    expected = (c[picked] @ inner.astype(mx.float32)[..., None]).squeeze(-1)
    assert error(y[order], expected + biases[2].astype(mx.float32)[picked]) < 4e-3


def test_pairs_of_row_and_expert_that_are_tiles_are_multiplied_as_digits() -> None:
    """Each reads the digits of its own row; a gate writes those of each pair."""
    rows, top, count, hidden, width = 3, 2, 5, 320, 128
    chosen = np.array([[4, 0], [0, 2], [4, 2]])
    order, tiles = tiles_of(chosen, 1)
    shapes = [(width, hidden), (width, hidden), (hidden, width)]
    (*gate, a), (*up, b), (*down, c) = (
        [
            mx.stack(list(part))
            for part in zip(
                *(matrix(*shape, AFFINE, 10 * seed + n) for n in range(count)), strict=True
            )
        ]
        for seed, shape in enumerate(shapes)
    )
    x, inner = random(rows, hidden, seed=7), mx.zeros((rows * top, width), mx.bfloat16)
    records = mx.zeros((rows * top * width // 64 * DIGIT_WORDS,), mx.uint32)
    own = {"experts": True, "tile": 1, "layout": RowLayout.DIGITS}
    first = few(hidden, width, AFFINE, rows, gated=True, **own)
    source = product_kernels.experts_first(
        first,
        count,
        top,
        joined=None,
        activation="silu",
        offsets=False,
        tiles=len(tiles),
        layout=RowLayout.DIGITS,
    )
    given = [digits_of(x), *gate, *up, order, tiles, inner, records]
    run(source, first, given, first.grid(-(-width // first.width), len(tiles)))
    picked = mx.array(chosen.reshape(-1))[order]
    rows_of = x.astype(mx.float32)[order // top][..., None]
    left, right = ((each[picked] @ rows_of).squeeze(-1) for each in (a, b))
    assert error(inner, left * mx.sigmoid(left) * right) < 5e-3
    assert mx.array_equal(records.reshape(-1, 40)[:, :32], digits_of(inner).reshape(-1, 40)[:, :32])

    y = mx.zeros((rows * top, hidden), mx.bfloat16)
    last = few(width, hidden, AFFINE, rows, **own)
    source = product_kernels.experts_down(last, count, tiles=len(tiles))
    run(
        source,
        last,
        [records, *down, order, tiles, y],
        last.grid(-(-hidden // last.width), len(tiles)),
    )
    expected = (c[picked] @ inner.astype(mx.float32)[..., None]).squeeze(-1)
    assert error(y[order], expected) < 5e-3


@pytest.mark.parametrize("cut", [Cut(64, 2)], ids=str, indirect=True)
def test_experts_without_gates_write_interleaved_rows(cut: Cut) -> None:
    rows, hidden, width, count = 40, 128, 192, 1
    *codes, numbers = (each[None] for each in matrix(width, hidden, MXFP4, 0))
    order, tiles = tiles_of(np.zeros((rows, 1), int), cut.rows)
    x, y = random(rows, hidden, seed=1), mx.zeros((rows, width), mx.bfloat16)
    gemm = interleaving(hidden, width, MXFP4, cut.rows, experts=True)
    source = product_kernels.experts_first(
        gemm,
        count,
        1,
        joined="x",
        activation="",
        offsets=False,
        tiles=len(tiles),
        layout=RowLayout.INTERLEAVED,
    )
    given = [interleaved(x), *codes, order, tiles, y]
    run(source, gemm, given, gemm.grid(-(-width // gemm.width), len(tiles)))
    assert error(y, interleaved(x.astype(mx.float32) @ numbers[0].T)) < 4e-3


def test_skinny_tiles_of_more_pairs_are_for_experts_in_4_bits() -> None:
    assert [most_skinny_pairs(bits) for bits in (4, 8, 16)] == [24, 8, 8]


def test_most_experts_have_one_tile() -> None:
    """By the rows of gpt-oss-20b, each with four of 32 experts."""

    def tiles(packing: Packing) -> list[int]:
        rows = 8, 32, 64, 128, 256, 512, 2048
        return [expert_tile(H200, 4 * each, 32, packing) for each in rows]

    assert tiles(MXFP4) == [8, 8, 16, 24, 64, 128, 128]
    assert tiles(BYTES) == [8, 8, 16, 32, 64, 128, 128]


def _interleaving(inputs: int, packing: Packing) -> list[WarpgroupGemm]:
    """Return products of experts that read interleaved rows, if a packing has such."""
    both = [
        warpgroups(inputs, 2880, packing, 64 * 64, gated=gated, experts=True)
        for gated in (True, False)
    ]
    return [replace(each, layout=RowLayout.INTERLEAVED) for each in both if takes_interleaved(each)]


@pytest.mark.slow
@pytest.mark.parametrize("packing", [*FLOATS, *GROUPS_OF_32], ids=name_of)
def test_products_compile(packing: Packing, tmp_path: Path) -> None:
    odd = 2880 // packing.group_size * packing.group_size
    gemms: list[product_kernels.Gemm] = [
        few(odd, 2880, packing, 1, gated=True, experts=True),
        few(odd, 2880, packing, 8, experts=True),
        few_by_sixteen(odd, 2880, packing, 64, gated=True, experts=True),
        few(4096, 4096, packing, 32),
        many(odd, 2880, packing, 64 * ROWS, gated=True, experts=True),
        many(4096, 4096, packing, 64),
        warpgroups(odd, 2880, packing, 64 * ROWS, gated=True, experts=True),
        warpgroups(odd, 2880, packing, 16 * ROWS, experts=True, tile=16),
        *_interleaving(odd, packing),
        warpgroups(4096, 4096, packing, 128),
        warpgroups(4096, 28_672, packing, 512, sharing=True),
    ]
    for place, gemm in enumerate(gemms):
        folder = tmp_path / str(place)
        folder.mkdir()
        assert gemm.fits
        if gemm.experts and gemm.gated:
            joined = joined_by(GATINGS["clamped"], "x", "y", mx.bfloat16)
            text = product_kernels.experts_first(
                gemm,
                32,
                4,
                joined=joined,
                activation="silu",
                offsets=True,
                tiles=64,
                layout=None if isinstance(gemm, WideGemm) else gemm.layout,
            )
        elif gemm.experts:
            text = product_kernels.experts_down(gemm, 32, offsets=True, tiles=64)
        else:
            text = product_kernels.linear(gemm, (4096, 1024, 1024), offsets=True)
        # Addresses of three matrices, by the assembler of CUDA 13.5; 16 bytes by that of 13.1. Of
        # experts, what a thread block knows of its next tile.
        many_tiles = isinstance(gemm, WarpgroupGemm) and (gemm.sharing or gemm.experts)
        assert_compiles(text, folder, spilled=80 if many_tiles else 8)


@pytest.mark.gpu
@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("kind", "rows"), [(few, 1), (few, 20), (many, 300), (warpgroups, 300)])
@pytest.mark.parametrize("packing", [AFFINE, BYTES, *GROUPS_OF_32, *FLOATS], ids=name_of)
def test_products_on_a_card_are_those_of_mlx(
    packing: Packing, kind: Callable[..., product_kernels.Gemm], rows: int, gated: bool
) -> None:
    if kind is warpgroups and not driver.card().warpgroups:
        pytest.skip("needs a card with warpgroups")
    inputs, outputs = 1024, 272
    (*gate, a), (*up, b) = (matrix(outputs, inputs, packing, seed) for seed in (0, 1))
    x, y = random(rows, inputs, seed=2), mx.zeros((rows, outputs), mx.bfloat16)
    gemm = kind(inputs, outputs, packing, rows, gated=gated)
    weights = [*gate, *up] if gated else gate
    given = [number(rows), x, *weights, y]
    mx.eval(given, a, b)
    source = (
        product_kernels.gated(gemm, "silu")
        if gated
        else product_kernels.linear(gemm, (outputs,), offsets=False)
    )
    grid = gemm.grid(-(-outputs // gemm.width))
    run(source, gemm, given, grid, DeviceRunner(compiler(), load_extension()))
    left, right = (x.astype(mx.float32) @ each.T for each in (a, b))
    assert error(y, left * mx.sigmoid(left) * right if gated else left) < 5e-3


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_what_a_thread_block_keeps_fits_the_card(card: Card) -> None:
    for packing in PACKINGS:
        for outputs in (16, 128, 4096, 28_672):
            for both in (False, True):
                gemm = many(4096, outputs, packing, 512, card, gated=both)
                assert gemm.fits, gemm
                assert gemm.width * -(-outputs // gemm.width) >= outputs
