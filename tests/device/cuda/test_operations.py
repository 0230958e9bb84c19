"""CUDA's operations where no kernel of ours serves: in MLX's terms, so that they run anywhere."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.device.cuda import operations
from quire.device.cuda.operations import CUDAOperations
from quire.device.cuda.products import MOST_ROWS
from quire.device.operations import Operations
from quire.device.weights import ExpertMatrices, PackedWeight, Packing


@pytest.mark.parametrize("packing", [Packing(64, 4, "affine"), Packing(32, 4, "mxfp4")])
@pytest.mark.parametrize("parts", [1, 3])
def test_many_rows_are_multiplied_by_unpacked_matrices(
    packing: Packing, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs, inputs = 96, 128
    mx.random.seed(0)
    options = {"group_size": packing.group_size, "bits": packing.bits, "mode": packing.mode}
    codes, scales, *biases = mx.quantize(mx.random.normal((outputs, inputs)), **options)
    weight = PackedWeight(codes, scales, biases[0] if biases else None, packing)
    x, bias = mx.random.normal((2, MOST_ROWS, inputs)), mx.random.normal((outputs,))
    monkeypatch.setattr(operations, "_UNPACKED_BYTES", outputs * inputs * 4 // parts)

    def refused(*arguments: object, **named: object) -> mx.array:
        raise AssertionError("MLX would compile it for half a minute")

    expected = Operations().packed_linear(x, weight, bias)
    monkeypatch.setattr(mx, "quantized_matmul", refused)
    got = CUDAOperations().packed_linear(x, weight, bias)
    assert mx.abs(got - expected).max().item() < 1e-3


def test_matrices_of_one_group_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = Packing(64, 8, "affine")
    heads = mx.random.normal((3, 96, 64), key=mx.random.key(0))
    codes = mx.quantize(heads, group_size=packing.group_size, bits=packing.bits)
    weight = PackedWeight(*(each[0] for each in codes), packing)
    matrices = ExpertMatrices(PackedWeight(*codes, packing), None)
    x = mx.random.normal((5, 3, 64), key=mx.random.key(1))
    usual, own = Operations(), CUDAOperations()
    expected = usual.packed_linear(x[:, 0], weight, None), usual.by_head(x, matrices)
    monkeypatch.setattr(mx, "quantized_matmul", None)
    got = own.packed_linear(x[:, 0], weight, None), own.by_head(x, matrices)
    for a, b in zip(expected, got, strict=True):
        assert mx.abs(a - b).max().item() < 1e-3


@pytest.mark.parametrize("tail", [(), (3,)])
@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32])
def test_of_rows(tail: tuple[int, ...], dtype: mx.Dtype) -> None:
    x = mx.random.normal((4, 7, *tail))
    numbers = mx.random.randint(0, 7, (4, 5)).astype(dtype)
    expected = [[x[row, n].tolist() for n in numbers[row].tolist()] for row in range(4)]
    for each in (Operations(), CUDAOperations()):
        assert each.of_rows(x, numbers).tolist() == expected


@pytest.mark.parametrize("vocabulary", [384, 100, 131])
def test_the_first_of_the_greatest_logits_is_best(vocabulary: int) -> None:
    logits = mx.floor(mx.random.normal((5, vocabulary), key=mx.random.key(0)) * 2)
    logits[3] = -mx.inf
    expected = Operations().best(logits).tolist()
    assert CUDAOperations().best(logits).tolist() == expected
