"""The kernel of products with any matrix, run in the CPU emulation beside MLX's products."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from quire.device.weights import PackedWeight, Packing
from quire.executor.graphs.products.plain_products import plain_product_kernel
from quire.program.values import Form, Node, Program, Value, Weight
from tests.executor.graphs.emulated import run_kernel
from tests.support.emulated_metal import why_not
from tests.support.nvrtc import assert_compiles
from tests.support.packings import MXFP4, MXFP8, NVFP4, packed

T = Form(0, (("T", 1),))
ROWS, INPUTS = 3, 320
CODED = {
    "4 bits": (1, Packing(64, 4, "affine"), False),
    "8 bits": (20, Packing(64, 8, "affine"), True),
    "3 bits": (5, Packing(32, 3, "affine"), False),
    "mxfp4": (4, MXFP4, True),
    "nvfp4": (4, NVFP4, False),
    "mxfp8": (4, MXFP8, False),
}
EVERYDAY = "4 bits"
FEW_COLUMNS = "bfloat16, 3 columns"
KINDS = [*CODED, "bfloat16", "float32", FEW_COLUMNS]


def product_of(kind: str) -> tuple[Program, mx.array, mx.array | None]:
    """Return the program of a product, its matrix in float32, and its bias."""
    mx.random.seed(1)
    bias: mx.array | None = None
    weight: mx.array | PackedWeight
    if kind in CODED:
        outputs, packing, biased = CODED[kind]
        weight = packed(mx.random.normal((outputs, INPUTS)).astype(mx.bfloat16), packing)
        matrix = weight.unpacked(mx.float32)
        bias = mx.random.normal((outputs,)).astype(mx.bfloat16) if biased else None
    else:
        dtype = mx.float32 if kind == "float32" else mx.bfloat16
        weight = mx.random.normal((7, 3 if kind == FEW_COLUMNS else INPUTS)).astype(dtype)
        matrix = weight.astype(mx.float32)
    values = {id: Value((T, width), mx.bfloat16) for id, width in enumerate(matrix.shape[::-1])}
    own = {"weight": Weight("w", weight), "bias": None if bias is None else Weight("b", bias)}
    node = Node("linear", (0,), (1,), ("x",), attributes=own)
    return Program(("T",), {"x": 0}, {}, values, (node,), (1,)), matrix, bias


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    "kind",
    [each if each == EVERYDAY else pytest.param(each, marks=pytest.mark.slow) for each in KINDS],
)
def test_products_are_those_of_mlx(kind: str) -> None:
    program, matrix, bias = product_of(kind)
    x = mx.random.normal((ROWS, matrix.shape[1])).astype(mx.bfloat16)
    expected = x.astype(mx.float32) @ matrix.T
    if bias is not None:
        expected = expected + bias
    kernel = plain_product_kernel(program, program.nodes[0])
    found = run_kernel(program, kernel, {0: x}, [1], ROWS, room=4)[1].astype(mx.float32)
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-2, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_products_compile(kind: str, tmp_path: Path) -> None:
    program, _, _ = product_of(kind)
    assert_compiles(plain_product_kernel(program, program.nodes[0]).text, tmp_path)
