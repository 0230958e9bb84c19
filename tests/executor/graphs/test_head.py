"""The kernel of the output head, run on the CPU and held against float32."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from quire.device.cuda.driver import Card
from quire.device.weights import Packing
from quire.executor.graphs.head import Head
from quire.executor.graphs.recorder import Kernel
from tests.support.emulated_steps import EmulatedRunner
from tests.support.everyday import everyday
from tests.support.packings import packed


@pytest.mark.parametrize("rows", everyday([3, 30], (3,).__contains__))
@pytest.mark.parametrize("group_size", everyday([32, 64, 128], (32,).__contains__))
def test_logits_are_products_with_the_weights(group_size: int, rows: int) -> None:
    inputs, outputs = 512, 96
    whole = mx.random.normal((outputs, inputs), key=mx.random.key(0)) * inputs**-0.5
    weight = packed(whole.astype(mx.bfloat16), Packing(group_size, 4, "affine"))
    x = mx.random.normal((rows, inputs), key=mx.random.key(1)).astype(mx.bfloat16)
    y = mx.zeros((rows, outputs))
    head = Head(rows, inputs, outputs, group_size, None, Card(1, 227 << 10))
    assert head.tiles == (1 if rows <= 8 else 4)
    assert weight.biases is not None
    given = [mx.array(np.array([rows], np.int32)), x, weight.codes, weight.scales, weight.biases, y]
    runner = EmulatedRunner()
    addresses = tuple(map(runner.address, given))
    runner.run(Kernel(head.text, head.grid, 32 * head.warps, head.shared, addresses, ()))
    expected = x.astype(mx.float32) @ weight.unpacked(mx.float32).T
    assert mx.linalg.norm(y - expected).item() < 1e-3 * mx.linalg.norm(expected).item()
