"""The kernel of products with any matrix, run in the CPU emulation beside MLX's products."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from quire.device.weights import Packing
from quire.executor.graphs.products.plain_products import PlainProduct
from quire.executor.graphs.recorder import Kernel
from tests.executor.graphs.emulated import bits_of
from tests.support.emulated_metal import guarded, why_not
from tests.support.emulated_steps import launch
from tests.support.nvrtc import assert_compiles
from tests.support.packings import MXFP4, MXFP8, NVFP4, packed

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


def product_of(kind: str) -> tuple[PlainProduct, mx.array]:
    """Return a product, and the matrix in float32."""
    mx.random.seed(1)
    if kind not in CODED:
        dtype = mx.float32 if kind == "float32" else mx.bfloat16
        matrix = mx.random.normal((7, 3 if kind == FEW_COLUMNS else INPUTS)).astype(dtype)
        return PlainProduct(mx.bfloat16, mx.bfloat16, matrix, None), matrix.astype(mx.float32)
    outputs, packing, biased = CODED[kind]
    matrix = mx.random.normal((outputs, INPUTS)).astype(mx.bfloat16)
    weight = packed(matrix, packing)
    bias = mx.random.normal((outputs,)).astype(mx.bfloat16) if biased else None
    return PlainProduct(mx.bfloat16, mx.bfloat16, weight, bias), weight.unpacked(mx.float32)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    "kind",
    [each if each == EVERYDAY else pytest.param(each, marks=pytest.mark.slow) for each in KINDS],
)
def test_products_are_those_of_mlx(kind: str) -> None:
    product, matrix = product_of(kind)
    x = mx.random.normal((ROWS, product.inputs)).astype(mx.bfloat16)
    expected = x.astype(mx.float32) @ matrix.T
    if product.bias is not None:
        expected = expected + product.bias
    to = guarded(np.zeros(ROWS * product.outputs, np.uint16))
    given = [guarded(bits_of(each)) for each in (mx.array([ROWS]), x, *product.arrays)]
    places = tuple(int(each.ctypes.data) for each in (*given, to))
    launch(Kernel(product.text, product.grid(4), product.threads, 0, places, ()))
    found = mx.array(to).view(mx.bfloat16).reshape(ROWS, -1).astype(mx.float32)
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-2, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_products_compile(kind: str, tmp_path: Path) -> None:
    assert_compiles(product_of(kind)[0].text, tmp_path)
