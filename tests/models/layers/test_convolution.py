"""The convolution of encoders, against MLX's own."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.models.layers.convolution import SAME, Convolution


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, SAME])
def test_as_mlx_convolves(kernel: int, stride: int, padding: int) -> None:
    maps = mx.random.normal((2, 7, 10, 5))
    ours = Convolution(5, 4, kernel, stride, padding=padding, bias=True)
    ours.weight, ours.bias = mx.random.normal((4, kernel, kernel, 5)), mx.random.normal((4,))
    around = maps
    if padding == SAME:  # more behind than before
        more = [max(0, (-(-n // stride) - 1) * stride + kernel - n) for n in (7, 10)]
        around = mx.pad(maps, [(0, 0), *((n // 2, n - n // 2) for n in more), (0, 0)])
    wanted = mx.conv2d(around, ours.weight, stride, max(padding, 0)) + ours.bias
    found = ours(maps)
    assert found.shape == wanted.shape
    assert mx.allclose(found, wanted, atol=1e-4).item()
