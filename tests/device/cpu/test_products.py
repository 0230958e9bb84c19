"""Products: right, and with the same bits whatever stands beside a row."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from quire.device.weights import FP8, Packing, in_tiles
from tests.support import packings

PACKINGS = [
    *(("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]
ROWS = 31
"""More than fit one register tile, and no multiple of any."""

BY_WORDS = 5e-5
"""Bound of a packed product's relative error: rows are rounded to 16 bits a group."""

IN_TILES = [
    *(("affine", bits, group) for bits in (4, 8) for group in (32, 64, 128)),
    ("mxfp4", 4, 32),
    ("nvfp4", 4, 16),
]
"""Packings whose codes may lie in tiles."""


def drawn(*shape: int, seed: int = 0) -> mx.array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return mx.array(values.astype(np.float32))


def relative_error(y: mx.array, x: mx.array, weight: mx.array) -> float:
    """Return the relative error against the product in float64."""
    exact = np.array(x).astype(np.float64) @ np.array(weight).astype(np.float64).T
    return float(np.abs(np.array(y) - exact).max() / np.abs(exact).max())


def rounded_by_group(x: mx.array, group: int, largest: int) -> mx.array:
    """Return rows whose groups are rounded to integers, at most `largest`, times a scale."""
    groups = x.reshape(len(x), -1, group)
    most = mx.abs(groups).max(axis=-1, keepdims=True)
    return (mx.round(groups * (largest / most)) * (most / largest)).reshape(x.shape)


@pytest.mark.parametrize(("mode", "bits", "group"), PACKINGS)
@pytest.mark.parametrize(("depth", "columns"), [(128, 2), (384, 33), (2176, 14)])
def test_packed_weights_multiply_as_their_values(
    ops: Any, mode: str, bits: int, group: int, depth: int, columns: int
) -> None:
    packed = mx.quantize(drawn(columns, depth), group_size=group, bits=bits, mode=mode)
    values = mx.dequantize(*packed, group_size=group, bits=bits, mode=mode).astype(mx.float32)
    x = drawn(ROWS, depth, seed=1)
    y = ops.product(x, *packed, group_size=group, bits=bits, mode=mode)
    assert relative_error(y, x, values) < BY_WORDS
    for rows in (1, 2, 5, 8, 9):
        fewer = ops.product(x[:rows], *packed, group_size=group, bits=bits, mode=mode)
        assert mx.array_equal(fewer, y[:rows]), f"{rows} rows have other bits than {ROWS}"


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("depth", "columns"), [(128, 2), (384, 33), (2176, 14)])
def test_fp8_multiplies_as_its_values(ops: Any, group: int, depth: int, columns: int) -> None:
    weight = packings.packed(drawn(columns, depth), Packing(group, 8, FP8))
    packing = {"group_size": group, "bits": 8, "mode": FP8}
    x = drawn(ROWS, depth, seed=1)
    y = ops.product(x, weight.codes, weight.scales, **packing)
    assert relative_error(y, x, weight.unpacked(mx.float32)) < 2e-6
    for rows in (1, 2, 5, 8, 9):
        fewer = ops.product(x[:rows], weight.codes, weight.scales, **packing)
        assert mx.array_equal(fewer, y[:rows]), f"{rows} rows have other bits than {ROWS}"


@pytest.mark.parametrize(
    ("mode", "bits", "group"), [("affine", 4, 64), ("affine", 8, 128), ("nvfp4", 4, 16)]
)
def test_packed_weights_with_hundreds_of_rows(ops: Any, mode: str, bits: int, group: int) -> None:
    depth, columns = 384, 70
    packed = mx.quantize(drawn(columns, depth), group_size=group, bits=bits, mode=mode)
    values = mx.dequantize(*packed, group_size=group, bits=bits, mode=mode).astype(mx.float32)
    x = drawn(300, depth, seed=1) * mx.power(2.0, mx.arange(300) % 200 - 100)[:, None]
    y = ops.product(x, *packed, group_size=group, bits=bits, mode=mode)
    for row in (0, 30, 299):
        assert relative_error(y[row], x[row], values) < BY_WORDS
    for rows in (1, 3, 16, 17, 270):
        fewer = ops.product(x[-rows:], *packed, group_size=group, bits=bits, mode=mode)
        assert mx.array_equal(fewer, y[-rows:])


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize(
    ("mode", "bits", "group"), [each for each in PACKINGS if each[0] != "mxfp8"]
)
def test_every_instruction_set_gives_the_same_bits(
    compiled: Any, mode: str, bits: int, group: int, rows: int
) -> None:
    """Sums of integers are exact in any order, and what they are as floats is added in one."""
    if len(compiled.instruction_sets()) == 1:
        pytest.skip("kernels built for one instruction set (QUIRE_BUILD_KERNELS=tests builds more)")
    packing = {"group_size": group, "bits": bits, "mode": mode}
    packed, x = mx.quantize(drawn(21, 1152), **packing), drawn(rows, 1152, seed=1)
    found = []
    for name in compiled.instruction_sets():
        compiled.use(name)
        found.append(compiled.product(x, *packed, **packing))
        mx.eval(found[-1])
    compiled.use("")
    for other in found[1:]:
        assert mx.array_equal(other, found[0])


@pytest.mark.parametrize(("mode", "bits", "group"), [*IN_TILES, ("affine", 6, 64)])
def test_rows_of_8_bits_are_exact_in_every_instruction_set(
    compiled: Any, mode: str, bits: int, group: int
) -> None:
    packing = {"group_size": group, "bits": bits, "mode": mode}
    depth = 1152 if group == 128 else 1216
    weight, x = drawn(112, depth), drawn(131, depth, seed=1)
    x[:, :group] = weight[:, 1:group] = 1.0  # the largest integers and codes
    weight[:, 0] = -1.0
    packed = mx.quantize(weight, **packing)
    values = mx.dequantize(*packed, **packing).astype(mx.float32)
    rounded = rounded_by_group(x, group, largest=127)
    found = []
    for name in compiled.instruction_sets():
        compiled.use(name, activation_bits=8)
        y = compiled.product(x, *packed, **packing)
        assert relative_error(y, rounded, values) < 2e-6
        assert 5e-4 < relative_error(y, x, values) < 2e-2
        found.append(y)
        for rows in (1, 2, 3, 16, 70):
            assert mx.array_equal(compiled.product(x[:rows], *packed, **packing), y[:rows])
        if compiled.reads_tiles(bits, mode):
            tiled = [in_tiles(each) for each in packed]
            for rows in (1, 2, 3, 4, 5, 6, 7, 11, 16, 17, 33, 131):
                in_few = compiled.product(x[:rows], *tiled, tiled=True, **packing)
                assert mx.array_equal(in_few, y[:rows]), f"{rows} rows have other bits"
    compiled.use("")
    assert all(mx.array_equal(other, found[0]) for other in found)


def test_activations_have_8_bits_or_16(compiled: Any) -> None:
    with pytest.raises(ValueError, match="8 bits or 16"):
        compiled.use("", activation_bits=4)


@pytest.mark.parametrize(("mode", "bits", "group"), IN_TILES)
def test_weights_in_tiles_give_the_same_bits(ops: Any, mode: str, bits: int, group: int) -> None:
    if not ops.reads_tiles(bits, mode):
        pytest.skip("these kernels read rows")
    depth = 1152 if group == 128 else 1216  # the last 128 are not all there
    packing = {"group_size": group, "bits": bits, "mode": mode}
    weight, x = drawn(112, depth), drawn(71, depth, seed=1)
    # The largest integers of either sign, and the least low digit, beside the largest codes.
    x[:, 0], x[:, 1:group] = 1.0, (126 * 256 + 128) / 32639
    x[:, group : 2 * group], x[:, 2 * group : 3 * group] = 1.0, -1.0
    weight[:, : 3 * group] = 1.0
    weight[:, : 3 * group : group] = -1.0
    packed = mx.quantize(weight, **packing)
    tiled = [in_tiles(each) for each in packed]
    offsets = drawn(112, seed=2)
    y = ops.product(x, *packed, offsets=offsets, **packing)
    for rows in (1, 2, 3, 4, 5, 6, 7, 11, 16, 17, 33, 49, 71):
        found = ops.product(x[:rows], *tiled, offsets=offsets, tiled=True, **packing)
        assert mx.array_equal(found, y[:rows]), f"{rows} rows have other bits"


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_weights_in_tiles_beside_others_have_the_same_rows(ops: Any, rows: int) -> None:
    if not ops.reads_tiles(4, "affine"):
        pytest.skip("these kernels read rows")
    packing = {"group_size": 32, "bits": 4}
    weights = [mx.quantize(drawn(columns, 128), **packing) for columns in (32, 33)]
    tiled = [in_tiles(each) for each in weights[0]]
    matrices = [ops.Matrix(*tiled, **packing, tiled=True), ops.Matrix(*weights[1], **packing)]
    segment, x = ops.Segment(), drawn(rows, 128, seed=1)
    given, products = segment.given(128), [segment.value(columns) for columns in (32, 33)]
    segment.products(given, matrices, products)
    for product, columns in zip(products, (32, 33), strict=True):
        segment.output(product, [columns])
    segment.finish()
    for found, weight in zip(segment.run([x]), weights, strict=True):
        assert mx.array_equal(found, ops.product(x, *weight, **packing))


def test_tiles_are_refused_where_they_are_not_read(ops: Any) -> None:
    packed = mx.quantize(drawn(20, 64), group_size=64, bits=4)
    with pytest.raises(ValueError, match="in tiles"):  # 20 columns are no tiles
        ops.product(drawn(2, 64), *packed, group_size=64, bits=4, tiled=True)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (6, 32)])
def test_scales_in_half_the_memory_give_the_same_bits(
    ops: Any, dtype: mx.Dtype, bits: int, group: int
) -> None:
    packing = {"group_size": group, "bits": bits}
    codes, *scales = mx.quantize(drawn(21, 1152), **packing)
    narrow = [each.astype(dtype) for each in scales]
    wide = [each.astype(mx.float32) for each in narrow]
    for rows in (1, 20):
        x = drawn(rows, 1152, seed=1)
        y = ops.product(x, codes, *narrow, **packing)
        assert mx.array_equal(y, ops.product(x, codes, *wide, **packing))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(ops: Any, value: float) -> None:
    packed = mx.quantize(drawn(20, 128), group_size=64, bits=4)
    x = drawn(18, 128, seed=1)
    y = ops.product(x, *packed, group_size=64, bits=4)
    x[3, 70] = value
    spoilt = ops.product(x, *packed, group_size=64, bits=4)
    finite = mx.isfinite(spoilt).all(axis=1)
    assert finite.tolist() == [row != 3 for row in range(18)]
    assert mx.array_equal(spoilt[4:], y[4:])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("depth", "columns"), [(100, 71), (32, 1), (1056, 33), (37, 7)])
def test_float_weights(ops: Any, dtype: mx.Dtype, depth: int, columns: int) -> None:
    weight = drawn(columns, depth).astype(dtype)
    x = drawn(300, depth, seed=1)
    y = ops.product(x, weight)
    assert relative_error(y, x, weight.astype(mx.float32)) < 2e-6
    for rows in (*range(1, 19), 200):
        assert mx.array_equal(ops.product(x[:rows], weight), y[:rows])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_bias_is_added(ops: Any, dtype: mx.Dtype) -> None:
    weight, bias, x = drawn(6, 64), drawn(6, seed=2).astype(dtype), drawn(3, 64, seed=1)
    y = ops.product(x, weight, offsets=bias)
    assert mx.allclose(y, ops.product(x, weight) + bias, rtol=0, atol=0)


def test_rows_that_do_not_lie_together(ops: Any) -> None:
    weight, x = drawn(6, 64), drawn(64, 9, seed=1)
    assert mx.array_equal(ops.product(x.T, weight), ops.product(mx.contiguous(x.T), weight))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_experts_multiply_their_rows(ops: Any, shared: bool, packed: bool) -> None:
    experts, columns, depth, rows, k = 5, 18, 128, 40, 3
    stack = drawn(experts, columns, depth)
    chosen = mx.array(np.random.default_rng(3).integers(0, experts, (rows, k)).astype(np.int32))
    x = drawn(rows, depth, seed=1) if shared else drawn(rows, k, depth, seed=1)
    each = mx.broadcast_to(x[:, None], (rows, k, depth)) if shared else x
    if packed:
        tensors = mx.quantize(stack, group_size=64, bits=4)
        y = ops.expert_product(x, chosen, *tensors, group_size=64, bits=4)
        stack = mx.dequantize(*tensors, group_size=64, bits=4)
        few = ops.expert_product(x[:2], chosen[:2], *tensors, group_size=64, bits=4)
    else:
        y = ops.expert_product(x, chosen, stack)
        few = ops.expert_product(x[:2], chosen[:2], stack)
    expected = (stack[chosen] @ each[..., None]).squeeze(-1)
    error = mx.abs(y - expected).max() / mx.abs(expected).max()
    assert error.item() < (BY_WORDS if packed else 2e-6)
    assert mx.array_equal(few, y[:2])


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("bits", [4, 8])
def test_experts_in_tiles_have_the_same_bits(ops: Any, bits: int, rows: int) -> None:
    if not ops.reads_tiles(bits, "affine"):
        pytest.skip("these kernels read codes by rows")
    experts, k = 5, 3
    chosen = mx.array(np.random.default_rng(3).integers(0, experts, (rows, k)).astype(np.int32))
    tensors = mx.quantize(drawn(experts, 48, 128), group_size=64, bits=bits)
    x, tiles = drawn(rows, 128, seed=1), [in_tiles(each) for each in tensors]
    y = ops.expert_product(x, chosen, *tiles, group_size=64, bits=bits, tiled=True)
    assert mx.array_equal(y, ops.expert_product(x, chosen, *tensors, group_size=64, bits=bits))


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("packing", [None, mx.bfloat16, (4, 64), (8, 32), (6, 64)])
def test_threads_change_no_bit(compiled: Any, packing: Any, rows: int) -> None:
    weight, x = drawn(1008, 512), drawn(rows, 512, seed=1)
    if isinstance(packing, tuple):
        options = dict(zip(("bits", "group_size"), packing, strict=True))
        tensors = mx.quantize(weight, **options)
        if compiled.reads_tiles(options["bits"], "affine"):
            tensors = [in_tiles(each) for each in tensors]
            options["tiled"] = True
    else:
        options, tensors = {}, [weight.astype(packing or mx.float32)]
    alone = compiled.product(x, *tensors, **options)
    mx.eval(alone)
    try:
        for threads in (2, 16):
            compiled.set_threads(threads)
            assert mx.array_equal(compiled.product(x, *tensors, **options), alone)
    finally:
        compiled.set_threads(1)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((mx.zeros((4, 32)),), "as deep as x"),
        ((mx.zeros((4, 64), dtype=mx.float16),), "float32 or bfloat16"),
        ((mx.zeros((4, 8), dtype=mx.uint32), mx.zeros((4, 2))), "have biases"),
    ],
)
def test_what_does_not_fit_is_refused(
    compiled: Any, tensors: tuple[mx.array, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compiled.product(mx.zeros((2, 64)), *tensors, group_size=32, bits=4)


def test_norm_and_gates(ops: Any) -> None:
    x, weight = drawn(5, 100), drawn(100, seed=1)
    assert mx.allclose(ops.rms_norm(x, weight, 1e-6), mx.fast.rms_norm(x, weight, 1e-6), atol=2e-6)
    assert mx.allclose(ops.rms_norm(x, None, 1e-6), mx.fast.rms_norm(x, None, 1e-6), atol=2e-6)
    added = ops.rms_norm(x, weight, 1e-6, 3 * x)
    assert mx.array_equal(added, 3 * x + ops.rms_norm(x, weight, 1e-6))
    scaled = ops.rms_norm(x, weight, 1e-6, 3 * x, mx.array([0.3]))
    assert mx.array_equal(scaled, added * mx.array([0.3]))
    wide = 8 * x
    assert mx.allclose(ops.gate(wide, x, "silu"), nn.silu(wide) * x, rtol=1e-6, atol=1e-6)
    gelu = ops.gate(wide, x, "gelu_pytorch_tanh")
    assert mx.allclose(gelu, nn.gelu_approx(wide) * x, rtol=1e-6, atol=1e-6)
    far = mx.array([-200.0, -90.0, 90.0, 200.0])
    near = mx.array([0.0, 0.0, 90.0, 200.0])
    assert mx.allclose(ops.gate(far, mx.ones(4), "silu"), near, rtol=0, atol=1e-30)


@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("half", [32, 8])
def test_rotation(ops: Any, neighbours: bool, half: int) -> None:
    x, angles = drawn(5, 3, 64), 10 * drawn(5, half, seed=1)
    y = ops.rotate(x, mx.cos(angles), mx.sin(angles), neighbours)
    step = 1 if neighbours else half
    first = mx.arange(half) * (2 if neighbours else 1)
    a, b = x[..., first], x[..., first + step]
    cos, sin = mx.cos(angles)[:, None], mx.sin(angles)[:, None]
    assert mx.allclose(y[..., first], a * cos - b * sin, atol=1e-6)
    assert mx.allclose(y[..., first + step], a * sin + b * cos, atol=1e-6)
    assert mx.array_equal(y[..., 2 * half :], x[..., 2 * half :])
