"""CUDA's operations where no kernel of ours serves: in MLX's terms, so that they run anywhere."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.device.activations import Gating
from quire.device.cuda import operations
from quire.device.cuda.operations import CUDAOperations
from quire.device.cuda.products import MOST_ROWS
from quire.device.operations import Operations
from quire.device.verified import relative_norm
from quire.device.weights import (
    ExpertMatrices,
    GatedExperts,
    PackedWeight,
    Packing,
    PlainExperts,
)
from tests.device.cuda.cards import RTX_3060
from tests.support.emulated_products import products_emulated
from tests.support.packings import MXFP4, packed

FOUR_BITS = Packing(64, 4, "affine")


def refused(*arguments: object, **named: object) -> mx.array:
    raise AssertionError("MLX would compile it for half a minute")


@pytest.mark.parametrize("packing", [FOUR_BITS, MXFP4])
@pytest.mark.parametrize("parts", [1, 3])
def test_many_rows_are_multiplied_by_unpacked_matrices(
    packing: Packing, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs, inputs = 96, 128
    mx.random.seed(0)
    weight = packed(mx.random.normal((outputs, inputs)), packing)
    x, bias = mx.random.normal((2, MOST_ROWS, inputs)), mx.random.normal((outputs,))
    monkeypatch.setattr(operations, "_UNPACKED_BYTES", outputs * inputs * 4 // parts)

    expected = Operations().packed_linear(x, weight, bias)
    monkeypatch.setattr(mx, "quantized_matmul", refused)
    got = CUDAOperations().packed_linear(x, weight, bias)
    assert mx.abs(got - expected).max().item() < 1e-3


@pytest.mark.parametrize(("columns", "rows"), [(64, 2), (128, 8)])
def test_matrices_that_mlx_multiplies_by_late_or_wrong_are_unpacked(
    columns: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = Packing(64, 8, "affine")
    heads = mx.random.normal((3, 96, columns), key=mx.random.key(0))
    codes = mx.quantize(heads, group_size=packing.group_size, bits=packing.bits)
    weight = PackedWeight(*(each[0] for each in codes), packing)
    matrices = ExpertMatrices(PackedWeight(*codes, packing), None)
    x = mx.random.normal((rows, 3, columns), key=mx.random.key(1))
    usual, own = Operations(), CUDAOperations()
    expected = usual.packed_linear(x[:, 0], weight, None), usual.by_head(x, matrices)
    monkeypatch.setattr(mx, "quantized_matmul", None)
    got = own.packed_linear(x[:, 0], weight, None), own.by_head(x, matrices)
    for a, b in zip(expected, got, strict=True):
        assert mx.abs(a - b).max().item() < 1e-3


@pytest.mark.parametrize(
    ("outputs", "packing"), [(1, FOUR_BITS), (24, FOUR_BITS), (32, Packing(64, 6, "affine"))]
)
def test_matrices_without_a_kernel_are_unpacked_where_mlx_would_compile(
    outputs: int, packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = packed(mx.random.normal((outputs, 128), key=mx.random.key(0)), packing)
    x, bias = (mx.random.normal(shape, key=mx.random.key(1)) for shape in ((8, 128), (outputs,)))
    expected = Operations().packed_linear(x, weight, bias)
    monkeypatch.setattr(mx, "quantized_matmul", refused)
    got = CUDAOperations().packed_linear(x, weight, bias)
    assert mx.abs(got - expected).max().item() < 1e-4
    with pytest.raises(AssertionError):
        CUDAOperations().packed_linear(x[:7], weight, bias)


def experts_of(kind: str, packing: Packing) -> GatedExperts | PlainExperts:
    """Return four experts with biases."""
    keys = mx.random.split(mx.random.key(0), 3)

    def matrices(number: int, *shape: int) -> ExpertMatrices:
        weight, bias = (
            (mx.random.normal(each, key=keys[number]) / 8).astype(mx.bfloat16)
            for each in (shape, shape[:-1])
        )
        return ExpertMatrices(packed(weight, packing), bias)

    up, down = matrices(0, 4, 192, 128), matrices(1, 4, 128, 192)
    if kind == "relu2":
        return PlainExperts(up, down, kind)
    return GatedExperts(matrices(2, 4, 192, 128), up, down, Gating("silu", limit=1.0, alpha=1.7))


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("packing", [FOUR_BITS, MXFP4], ids=str)
@pytest.mark.parametrize("kind", ["clipped", "relu2"])
def test_experts_with_biases_need_no_kernel_of_mlx(
    kind: str, packing: Packing, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = experts_of(kind, packing)
    x = mx.random.normal((rows, 128), key=mx.random.key(1)).astype(mx.bfloat16)
    chosen = mx.argsort(mx.random.normal((rows, 4), key=mx.random.key(2)))[:, :2].astype(mx.int32)
    expected = Operations().expert_outputs(x.astype(mx.float32), chosen, experts)
    monkeypatch.setattr(mx, "gather_qmm", refused)
    with products_emulated(RTX_3060):
        operations = CUDAOperations()
        monkeypatch.setattr(operations._products, "sound", lambda kind: True)
        got = operations.expert_outputs(x, chosen, experts)
        assert got.dtype == mx.bfloat16
        assert relative_norm(got, expected).item() < 1e-2
        operations._products.sound = lambda kind: False  # type: ignore[method-assign]
        with pytest.raises(AssertionError):
            operations.expert_outputs(x, chosen, experts)


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
