"""Products of packed weights by kernels of our own."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from quire.device.cuda import products
from quire.device.cuda.products import Packed, Products, few_defines, header, many_defines
from quire.device.gpu_kernels import kernel_text
from tests.support.nvcc import assert_compiles

GATED, DOWN = {"GATED": 1, "TOP": 8, "GELU": 1}, {"GATED": 0, "TOP": 1, "GELU": 0}
PRODUCT = (
    "const T* x, const int* x_shape, const unsigned* w, const int* w_shape, const T* scales,"
    "const T* biases, const unsigned* w_up, const T* scales_up, const T* biases_up,"
    "const int* order, const int* tiles, T* y"
)
SOURCES = [
    ("few.cuh", few_defines(64, experts=False) | DOWN, PRODUCT),
    *(("few.cuh", few_defines(128, experts=True) | more, PRODUCT) for more in (GATED, DOWN)),
    *(
        ("many.cuh", many_defines(64, dense=dense) | more, PRODUCT)
        for more in (GATED, DOWN)
        for dense in (False, True)
    ),
    ("few.cuh", few_defines(64, experts=False) | DOWN | {"TILES": 4}, PRODUCT),
    ("unpack.cuh", {"GROUP": 64, "GELU": 0}, PRODUCT),
    (
        "gate.cuh",
        {"GELU": 1},
        "const T* gate, const int* gate_shape, const T* up, T* y",
    ),
    (
        "group.cuh",
        {"EXPERT_COUNT": 128, "TILE": 64, "GELU": 0},
        "const unsigned* chosen, const int* chosen_shape, int* order, int* tiles",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "defines", "arguments"), SOURCES)
def test_sources_compile(
    name: str, defines: dict[str, int], arguments: str, tmp_path: Path
) -> None:
    body = kernel_text("quire.device.cuda", name)
    text = f'{header(defines)}extern "C" __global__ void kernel({arguments}) {{\n{body}}}\n'
    assert_compiles(text, tmp_path)


def packed(
    *shape: int, bits: int = 4, group_size: int = 64, dtype: mx.Dtype = mx.bfloat16
) -> Packed:
    codes, scales, biases = mx.quantize(
        mx.random.normal(shape).astype(dtype), group_size=group_size, bits=bits
    )
    return Packed(codes, scales, biases, group_size, bits)


@pytest.mark.parametrize(
    ("weight", "readable"),
    [
        (packed(32, 128), True),
        (packed(32, 128, group_size=128), True),
        (packed(4, 32, 128), True),
        (packed(32, 128, bits=8), False),
        (packed(32, 128, group_size=32), False),
        (packed(24, 128), False),
        (packed(32, 128, dtype=mx.float32), False),
    ],
)
def test_which_matrices_the_kernels_read(weight: Packed, readable: bool) -> None:
    assert weight.readable_by_kernels == readable


def test_without_a_gpu_mlx_multiplies() -> None:
    if mx.default_device() == mx.gpu:
        pytest.skip("needs a CPU")
    one = Products()
    assert one.linear(mx.zeros((4, 128), mx.bfloat16), packed(32, 128)) is None
    assert not one.sound


@pytest.mark.gpu
@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA")
def test_kernels_agree_with_mlx() -> None:
    assert products._difference() is None
