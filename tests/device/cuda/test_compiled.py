"""The sources of kernels that are compiled once a machine."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from quire.device.cuda.compiled import CompiledKernel
from tests.support.nvcc import assert_compiles

BODY = "y[threadIdx.x] = x_shape[1] * (float)x[x_shape[0] - 1] + w[0];"


def text() -> str:
    kernel = CompiledKernel(["x", "w"], ["y"], BODY, "// header", 0)
    return kernel.text([mx.bfloat16, mx.uint32], [mx.float32], {0: 2}, 96)


def test_shapes_that_a_body_reads_come_as_numbers_behind_the_arrays() -> None:
    assert "__launch_bounds__(96)" in text()
    signature = (
        "const __nv_bfloat16* x,\nconst unsigned* w,\nfloat* y,\nint x_size_0,\nint x_size_1)"
    )
    assert signature in text()
    assert "const int x_shape[2] = {x_size_0, x_size_1};" in text()


@pytest.mark.slow
def test_it_compiles(tmp_path: Path) -> None:
    assert_compiles(text(), tmp_path)
