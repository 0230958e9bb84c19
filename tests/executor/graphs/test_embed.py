"""The generated look-up in tables computes what MLX does, on an emulated card."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import pytest

from quire.device.operations import Operations
from quire.device.weights import PackedWeight, Packing, in_tiles
from quire.executor.graphs.rows.embed import embed_kernel, gathered_kernel
from quire.executor.graphs.source import NotGenerated
from quire.program.values import Form, Node, Program, Value, Weight
from tests.executor.graphs.emulated import run_kernel
from tests.support.emulated_metal import why_not
from tests.support.everyday import everyday
from tests.support.packings import FLOATS, packed

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

T = Form(0, (("T", 1),))
TOKENS = mx.array([31, 0, 7, 7, 16], mx.int32)


def embedded(table: mx.array | PackedWeight, width: int, dtype: mx.Dtype) -> mx.array:
    """Return rows of a table by a generated kernel."""
    values = {0: Value((T,), mx.int32), 1: Value((T, width), dtype)}
    attributes = {"table": Weight("table", table), "dtype": dtype}
    node = Node("embed", (0,), (1,), ("tokens",), (), attributes)
    program = Program(("T",), {"tokens": 0}, {}, values, (node,), (1,))
    kernel = embed_kernel(program, node)
    return run_kernel(program, kernel, {0: TOKENS}, [1], len(TOKENS), len(TOKENS) + 3)[1]


WIDTHS = {mx.float32: 24, mx.float16: 2048, mx.bfloat16: 1544}


@pytest.mark.parametrize(
    ("dtype", "width"),
    everyday(product(WIDTHS, WIDTHS.values()), lambda *case: case == (mx.bfloat16, 1544)),
    ids=str,
)
def test_rows_of_numbers(dtype: mx.Dtype, width: int) -> None:
    table = mx.random.normal((32, width)).astype(dtype)
    assert mx.array_equal(embedded(table, width, dtype), table[TOKENS])


@pytest.mark.parametrize("shape", [(24,), (3, 40), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.int32], ids=str)
def test_rows_of_a_value(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    wanted, rows = Form(0, (("R", 1),)), (mx.random.normal((32, *shape)) * 100).astype(dtype)
    values = {0: Value((T, *shape), dtype), 1: Value((wanted,), mx.int32)}
    values[2] = Value((wanted, *shape), dtype)
    node = Node("Gather", (0, 1), (2,), arguments=((0,), (1, *shape)))
    program = Program(("T", "R"), {"x": 0, "wanted": 1}, {}, values, (node,), (2,))
    kernel, count = gathered_kernel(program, node), len(TOKENS)
    found = run_kernel(program, kernel, {0: rows, 1: TOKENS}, [2], rows=count, room=count + 3)[2]
    assert mx.array_equal(found, rows[TOKENS])


def test_other_gathers_have_no_kernel() -> None:
    values = {0: Value((T, 8), mx.float32), 1: Value((T,), mx.int32), 2: Value((T, 8), mx.float32)}
    node = Node("Gather", (0, 1), (2,), arguments=((1,), (8, 1)))
    with pytest.raises(NotGenerated, match="whole rows"):
        gathered_kernel(Program(("T",), {}, {}, values, (node,), (2,)), node)


CODES = list(product((2, 3, 4, 5, 6, 8), (32, 64), (mx.float32, mx.bfloat16), (False, True)))


def one_in_four(bits: int, group_size: int, dtype: mx.Dtype, tiled: bool) -> bool:
    """Choose two cases of each number of bits, which differ in all other respects."""
    half = bits % 2 == 1
    return (group_size == 32) == ((dtype == mx.float32) ^ half) == tiled


@pytest.mark.parametrize(
    ("bits", "group_size", "dtype", "tiled"), everyday(CODES, one_in_four), ids=str
)
def test_rows_of_codes(bits: int, group_size: int, dtype: mx.Dtype, tiled: bool) -> None:
    table = mx.random.normal((32, 320)).astype(mx.bfloat16)
    arrays = mx.quantize(table, group_size, bits)
    codes, scales, biases = (in_tiles(each) for each in arrays) if tiled else arrays
    weight = PackedWeight(codes, scales, biases, Packing(group_size, bits, "affine"), tiled)
    expected = Operations().embed(TOKENS, weight, dtype).astype(mx.float32)
    found = embedded(weight, 320, dtype).astype(mx.float32)
    limit = 2e-6 if dtype == mx.float32 else 2**-7
    assert mx.all(mx.abs(found - expected) <= limit * mx.abs(expected).max())


@pytest.mark.parametrize(
    "packing", everyday(FLOATS, FLOATS[:1].__contains__), ids=lambda packing: packing.mode
)
def test_rows_of_float_codes(packing: Packing) -> None:
    table = mx.random.normal((32, 384)).astype(mx.bfloat16)
    weight = packed(table, packing)
    expected = Operations().embed(TOKENS, weight, None)
    assert mx.array_equal(embedded(weight, 384, expected.dtype), expected)
