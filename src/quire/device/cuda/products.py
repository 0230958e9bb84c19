"""Products of packed weights on tensor cores: affine codes of 4 bits, bfloat16.

MLX 0.32.4 reads a matrix once for each of 2 to 7 rows, and gathers experts pair by pair.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cache, cached_property, partial

import mlx.core as mx

from quire.device.cuda.driver import card
from quire.device.cuda.few import Few
from quire.device.gpu_kernels import Kernel, cuda_kernel, kernel_text, problem_of
from quire.device.kept import Claim, Fact, kept

log = logging.getLogger("quire.device")

_PACKAGE = "quire.device.cuda"
MOST_ROWS = 512
"""Rows up to which matrices are multiplied by codes.

With more, cuBLAS is faster, once a matrix is unpacked. But it chooses a kernel for each number of
rows anew, tens of milliseconds a step, and MLX builds a step's graphs anew around its kernels.
"""
_FEW_ROWS = 64
"""Rows up to which a thread block has 16 of a matrix's rows for itself."""
_FEW_TILE, _MANY_TILE = 8, 64
"""Pairs of row and expert in a tile, where few rows come to an expert, and where many do."""
_MOST_EXPERTS = 1024
_GROUP_LANES, _LANES, _MANY_LANES = 1024, 256, 128
_TOLERANCE = 1e-2
_WIDE, _WIDE_OF_EXPERTS = 16_384, 4096
"""Columns of matrices that are held against MLX's, as wide as those of models."""
_AGREE = Fact(Claim.PRODUCTS_AGREE)

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
"""What `experts` can apply, and what the kernels' `GELU` is for each."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix `[out, in]`, or one an expert, `[experts, out, in]`, in MLX's affine packing.

    Attributes:
        codes: `[..., out, in / 8]`, uint32.
        scales, biases: `[..., out, in / group_size]`.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int

    @property
    def readable_by_kernels(self) -> bool:
        """Whether the kernels read it."""
        return (
            self.bits == 4
            and self.group_size in (64, 128)
            and self.scales.dtype == mx.bfloat16
            and self.codes.shape[-2] % 16 == 0
            and self.codes.shape[-1] % 8 == 0
        )


class Products:
    """The kernels, held against MLX's products once; where they differ, none is used."""

    @cached_property
    def sound(self) -> bool:
        """Whether this machine computes them as MLX's products. Compiles all of them, once."""
        if kept().holds(_AGREE):
            return True
        difference = problem_of(_difference)
        if difference is not None:
            log.warning("packed products by MLX's own kernels: %s", difference)
        else:
            kept().note(_AGREE)
        return difference is None

    def linear(self, x: mx.array, weight: Packed) -> mx.array | None:
        """`[..., in]` -> `[..., out]`; None where the kernels do not serve."""
        rows = x.size // x.shape[-1]
        if not 1 < rows <= MOST_ROWS or x.dtype != mx.bfloat16:
            return None
        if not (weight.readable_by_kernels and self.sound):
            return None
        if rows <= _FEW_ROWS and not _fits(_few(rows, weight)):
            return None
        y = _linear(x.reshape(rows, -1), weight)
        return y.reshape(*x.shape[:-1], -1)

    def gated(self, x: mx.array, gate: Packed, up: Packed, activation: str) -> mx.array | None:
        """`activation(gate(x)) * up(x)`, `[M, in]` -> `[M, out]`; None where nothing serves."""
        if not _FEW_ROWS < x.shape[0] <= MOST_ROWS or x.dtype != mx.bfloat16:
            return None
        if activation not in ACTIVATIONS or gate.group_size != up.group_size:
            return None
        if not (gate.readable_by_kernels and up.readable_by_kernels and self.sound):
            return None
        return _many(x, gate, up, ACTIVATIONS[activation])

    def unpacked(self, weight: Packed, dtype: mx.Dtype) -> mx.array | None:
        """`[out, in]` of a matrix; None where the kernels do not serve."""
        if dtype != mx.bfloat16 or not (weight.readable_by_kernels and self.sound):
            return None
        return _unpacked(weight)

    def gate(self, activation: str, x: mx.array, y: mx.array) -> mx.array | None:
        """`activation(x) * y` of arrays of one shape; None where the kernels do not serve."""
        if x.dtype != mx.bfloat16 or y.dtype != mx.bfloat16 or x.shape != y.shape or x.size % 8:
            return None
        if activation not in ACTIVATIONS or not self.sound:
            return None
        return _gated(x, y, ACTIVATIONS[activation])

    def experts(
        self,
        x: mx.array,
        chosen: mx.array,
        matrices: tuple[Packed, Packed, Packed],
        activation: str,
    ) -> mx.array | None:
        """The outputs of the chosen experts' gated MLPs.

        Args:
            x: `[T, hidden]`.
            chosen: `[T, k]`, uint32 or int32.
            matrices: gate, up and down.
            activation: of the gate.

        Returns:
            `[T, k, hidden]`; None where the kernels do not serve.
        """
        gate, up, down = matrices
        if x.dtype != mx.bfloat16 or activation not in ACTIVATIONS:
            return None
        if (
            not (gate.readable_by_kernels and up.readable_by_kernels and down.readable_by_kernels)
            or gate.group_size != up.group_size
        ):
            return None
        if gate.codes.shape[-2] % 64 or down.codes.shape[-2] % 128:
            return None
        if gate.codes.shape[0] > _MOST_EXPERTS or not self.sound:
            return None
        if not all(map(_fits, _few_of_experts(gate, down))):
            return None
        return _experts(x, chosen, matrices, ACTIVATIONS[activation])


def _linear(x: mx.array, weight: Packed) -> mx.array:
    """`[M, in]` -> `[M, out]`."""
    rows = x.shape[0]
    if rows > _FEW_ROWS:
        return _many(x, weight)
    few = _few(rows, weight)
    return _linear_kernel(few)(
        inputs=[x, weight.codes, weight.scales, weight.biases],
        grid=(-(-few.outputs // few.width) * few.threads, few.blocks, 1),
        threadgroup=(few.threads, 1, 1),
        output_shapes=[(rows, few.outputs)],
        output_dtypes=[mx.bfloat16],
    )[0]


def _few(rows: int, weight: Packed) -> Few:
    outputs, words = weight.codes.shape
    return _cut(words * 8, outputs, weight.group_size, 1 << max(3, (rows - 1).bit_length()))


def _few_of_experts(gate: Packed, down: Packed) -> tuple[Few, Few]:
    """Of gate and up, and of down."""
    outputs, hidden = gate.codes.shape[1], down.codes.shape[1]
    return (
        _cut(hidden, outputs, gate.group_size, _FEW_TILE, gated=True, experts=True),
        _cut(outputs, hidden, down.group_size, _FEW_TILE, experts=True),
    )


@cache
def _cut(
    inputs: int,
    outputs: int,
    group_size: int,
    rows: int,
    *,
    gated: bool = False,
    experts: bool = False,
) -> Few:
    """Kept, as it is asked for at each product."""
    return Few(inputs, outputs, group_size, rows, card(), gated, experts)


@cache
def _fits(few: Few) -> bool:
    """Whether the card has the shared memory. Says once where it has not."""
    if not few.fits:
        log.warning(
            "products of %d rows and %d columns by MLX's own kernels: they need %d bytes of "
            "shared memory, and the card has %d",
            *(few.rows, few.inputs, few.shared, few.card.shared),
        )
    return few.fits


def _many(x: mx.array, weight: Packed, up: Packed | None = None, gelu: int = 0) -> mx.array:
    """`[M, in]` -> `[M, out]` of many rows; with `up`, `activation(weight(x)) * up(x)`."""
    rows, outputs = x.shape[0], weight.codes.shape[0]
    second = [] if up is None else [up.codes, up.scales, up.biases]
    width = 128 if up is None else 64
    return _dense_kernel(up is not None, weight.group_size, gelu)(
        inputs=[x, weight.codes, weight.scales, weight.biases, *second],
        grid=(-(-outputs // width) * _MANY_LANES, -(-rows // _MANY_TILE), 1),
        threadgroup=(_MANY_LANES, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[mx.bfloat16],
    )[0]


def _unpacked(weight: Packed) -> mx.array:
    """`[out, in]`."""
    outputs, words = weight.codes.shape
    return _unpack_kernel(weight.group_size)(
        inputs=[weight.codes, weight.scales, weight.biases],
        grid=(-(-outputs * words // _LANES) * _LANES, 1, 1),
        threadgroup=(_LANES, 1, 1),
        output_shapes=[(outputs, words * 8)],
        output_dtypes=[mx.bfloat16],
    )[0]


def _gated(x: mx.array, y: mx.array, gelu: int) -> mx.array:
    """`activation(x) * y` of arrays of one shape, whose size is a multiple of 8."""
    return _gate_kernel(gelu)(
        inputs=[x.reshape(-1, 8), y.reshape(-1, 8)],
        grid=(-(-x.size // 8 // _LANES) * _LANES, 1, 1),
        threadgroup=(_LANES, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[mx.bfloat16],
    )[0]


def _experts(
    x: mx.array, chosen: mx.array, matrices: tuple[Packed, Packed, Packed], gelu: int
) -> mx.array:
    gate, up, down = matrices
    top, pairs, count = chosen.shape[-1], chosen.size, gate.codes.shape[0]
    many = pairs > _FEW_TILE * count
    tile = _MANY_TILE if many else _FEW_TILE
    most = min(pairs, count + pairs // tile)
    order, tiles = _group_kernel(count, tile)(
        inputs=[chosen.reshape(-1)],
        grid=(_GROUP_LANES, 1, 1),
        threadgroup=(_GROUP_LANES, 1, 1),
        output_shapes=[(pairs,), (most, 3)],
        output_dtypes=[mx.int32, mx.int32],
    )
    few_gate, few_down = _few_of_experts(gate, down)
    product = partial(_expert_product, pairs=pairs, tiles=most, many=many)
    gated = [x, gate.codes, gate.scales, gate.biases, up.codes, up.scales, up.biases]
    inner = product([*gated, order, tiles], few_gate, top=top, gelu=gelu)
    y = product([inner, down.codes, down.scales, down.biases, order, tiles], few_down)
    return y.reshape(-1, top, few_down.outputs)


def _expert_product(
    inputs: list[mx.array],
    few: Few,
    *,
    pairs: int,
    tiles: int,
    many: bool,
    top: int = 1,
    gelu: int = 0,
) -> mx.array:
    """`[pairs, outputs]`: a row for each pair of row and expert.

    Args:
        many: many rows come to an expert.
        top: pairs that share a row of the input.
    """
    width = (64 if few.gated else 128) if many else few.width
    lanes = _MANY_LANES if many else few.threads
    return _expert_kernel(many, few, top, gelu)(
        inputs=inputs,
        grid=(-(-few.outputs // width) * lanes, tiles, 1),
        threadgroup=(lanes, 1, 1),
        output_shapes=[(pairs, few.outputs)],
        output_dtypes=[mx.bfloat16],
    )[0]


# -- kernels ---------------------------------------------------------------------------------------


def many_defines(group_size: int, *, dense: bool) -> dict[str, int]:
    """The constants of `many.cuh`, but for those of a gate."""
    return {"GROUP": group_size, "DENSE": int(dense)}


def header(defines: dict[str, int]) -> str:
    """What stands before a kernel's source."""
    lines = ["#include <cuda_bf16.h>", *(f"#define {name} {n}" for name, n in defines.items())]
    return "\n".join([*lines, "typedef __nv_bfloat16 T;", ""]) + kernel_text(_PACKAGE, "common.cuh")


@cache
def _linear_kernel(few: Few) -> Kernel:
    names = ["x", "w", "scales", "biases"]
    return _compiled("few", names, ["y"], few.defines | {"GELU": 0}, few.shared)


@cache
def _unpack_kernel(group_size: int) -> Kernel:
    return _compiled("unpack", ["w", "scales", "biases"], ["y"], {"GROUP": group_size, "GELU": 0})


@cache
def _gate_kernel(gelu: int) -> Kernel:
    return _compiled("gate", ["gate", "up"], ["y"], {"GELU": gelu})


@cache
def _expert_kernel(many: bool, few: Few, top: int, gelu: int) -> Kernel:
    own = many_defines(few.group_size, dense=False) if many else few.defines
    defines = own | {"GATED": int(few.gated), "TOP": top, "GELU": gelu}
    inputs, shared = [*_matrices(few.gated), "order", "tiles"], 0 if many else few.shared
    return _compiled("many" if many else "few", inputs, ["y"], defines, shared)


@cache
def _dense_kernel(gated: bool, group_size: int, gelu: int) -> Kernel:
    defines = many_defines(group_size, dense=True) | {"GATED": int(gated), "TOP": 1, "GELU": gelu}
    return _compiled("many", _matrices(gated), ["y"], defines)


def _matrices(gated: bool) -> list[str]:
    second = ["w_up", "scales_up", "biases_up"] if gated else []
    return ["x", "w", "scales", "biases", *second]


@cache
def _group_kernel(experts: int, tile: int) -> Kernel:
    defines = {"EXPERT_COUNT": experts, "TILE": tile, "GELU": 0}
    return _compiled("group", ["chosen"], ["order", "tiles"], defines)


def _compiled(
    name: str, inputs: list[str], outputs: list[str], defines: dict[str, int], shared: int = 0
) -> Kernel:
    own = "_".join(str(n) for n in defines.values())
    body = kernel_text(_PACKAGE, f"{name}.cuh")
    return cuda_kernel(f"quire_{name}_{own}", inputs, outputs, body, header(defines), shared)


# -- held against MLX's ----------------------------------------------------------------------------


def _difference() -> str | None:
    """How far the kernels are from MLX's products, of random weights; None if near enough.

    Those of few rows also for wide matrices, after narrow ones: the same kernels then ask for more
    shared memory.
    """
    for group_size in (64, 128):
        weight = _random(144, 256, group_size, 0)
        difference = _compared(_unpacked(weight), _plain(weight))
        if difference:
            return f"numbers of codes, groups of {group_size}: {difference}"
        for rows in (2, 8, 13, 50, 65, 130):
            x = mx.random.normal((rows, 256), key=mx.random.key(rows)).astype(mx.bfloat16)
            difference = _compared(_linear(x, weight), x @ _plain(weight).T)
            if difference:
                return f"{rows} rows, groups of {group_size}: {difference}"
        gated = _many(x, weight, other := _random(144, 256, group_size, 1))
        inner = [x @ _plain(each).T for each in (weight, other)]
        difference = _compared(gated, _spelled_out(inner[0], inner[1], 0))
        if difference:
            return f"gated, groups of {group_size}: {difference}"
        wide = _random(144, _WIDE, group_size, 2)
        for rows in (2, 13, 50):
            x = mx.random.normal((rows, _WIDE), key=mx.random.key(rows)).astype(mx.bfloat16)
            difference = _compared(_linear(x, wide), x @ _plain(wide).T)
            if difference:
                return f"{rows} rows of {_WIDE}, groups of {group_size}: {difference}"
    for activation, gelu in ACTIVATIONS.items():
        x, y = mx.random.normal((2, 40, 24), key=mx.random.key(gelu)).astype(mx.bfloat16)
        difference = _compared(_gated(x, y, gelu), _spelled_out(x, y, gelu))
        if difference:
            return f"{activation}: {difference}"
    for hidden, counts in ((256, (1, 9, 100)), (_WIDE_OF_EXPERTS, (1, 9))):
        for rows in counts:
            difference = _difference_of_experts(hidden, rows)
            if difference:
                return f"experts, {rows} rows of {hidden}: {difference}"
    return None


def _difference_of_experts(hidden: int, rows: int) -> str | None:
    count = 8
    gate, up = _random(64, hidden, 64, 1, count), _random(64, hidden, 64, 2, count)
    down = _random(hidden, 64, 64, 3, count)
    x = mx.random.normal((rows, hidden), key=mx.random.key(rows)).astype(mx.bfloat16)
    chosen = mx.argsort(mx.random.normal((rows, count), key=mx.random.key(rows)))[:, :3]
    chosen = chosen.astype(mx.int32)
    got = _experts(x, chosen, (gate, up, down), 0)
    inner = [(x[:, None, None] @ _plain(m)[chosen].swapaxes(-1, -2)) for m in (gate, up)]
    product = _spelled_out(inner[0], inner[1], 0).astype(mx.bfloat16)
    expected = (product @ _plain(down)[chosen].swapaxes(-1, -2)).squeeze(-2)
    return _compared(got, expected)


def _spelled_out(x: mx.array, y: mx.array, gelu: int) -> mx.array:
    """`activation(x) * y` in float32."""
    x, y = x.astype(mx.float32), y.astype(mx.float32)
    if not gelu:
        return x * mx.sigmoid(x) * y
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + mx.tanh(inner)) * y


def _random(outputs: int, inputs: int, group_size: int, seed: int, experts: int = 0) -> Packed:
    shape = (experts, outputs, inputs) if experts else (outputs, inputs)
    matrix = (mx.random.normal(shape, key=mx.random.key(seed)) * inputs**-0.5).astype(mx.bfloat16)
    codes, scales, biases = mx.quantize(matrix, group_size=group_size, bits=4)
    return Packed(codes, scales, biases, group_size, 4)


def _plain(weight: Packed) -> mx.array:
    """The matrix in float32."""
    return mx.dequantize(
        weight.codes,
        weight.scales.astype(mx.float32),
        weight.biases.astype(mx.float32),
        group_size=weight.group_size,
        bits=weight.bits,
    )


def _compared(got: mx.array, expected: mx.array) -> str | None:
    expected = expected.astype(mx.float32)
    error = float(mx.linalg.norm(got.astype(mx.float32) - expected) / mx.linalg.norm(expected))
    # Written so that a NaN is too much.
    return None if error <= _TOLERANCE else f"relative error {error:.2g}, allowed {_TOLERANCE}"
