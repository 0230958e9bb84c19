"""Kernels that multiply by packed weights, and how they are launched."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from quire.device.cuda.driver import card
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.cuda.warpgroup_gemm import WarpgroupGemm
from quire.device.cuda.wide_gemm import ROWS, WideGemm
from quire.device.gpu_kernels import Kernel, cuda_kernel, kernel_text

Wide = WideGemm | WarpgroupGemm

log = logging.getLogger("quire.device")

_PACKAGE = "quire.device.cuda"
SKINNY_ROWS = 64
"""Most rows of a skinny GEMM, in which a thread block computes 16 rows of the matrix."""
_SKINNY_TILE = 8
"""Pairs of row and expert per tile if experts get few rows; `ROWS` otherwise."""
_GROUP_LANES, _LANES = 1024, 256

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
"""Activations that `experts` supports, and the kernels' `GELU` constant for each."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix `[out, in]`, or a stack `[experts, out, in]`, in MLX's affine packing.

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
        """Whether the kernels support its packing and shape."""
        return (
            self.bits == 4
            and self.group_size in (32, 64, 128)
            and self.scales.dtype == mx.bfloat16
            and self.codes.shape[-2] % 16 == 0
            and self.codes.shape[-1] % 8 == 0
        )


def linear(x: mx.array, weight: Packed) -> mx.array:
    """Multiply rows: `[M, in]` -> `[M, out]`."""
    rows = x.shape[0]
    if rows > SKINNY_ROWS:
        return many_rows(x, weight)
    gemm = skinny_gemm(rows, weight)
    return _linear_kernel(gemm)(
        inputs=[x, weight.codes, weight.scales, weight.biases],
        grid=(-(-gemm.outputs // gemm.width) * gemm.threads, gemm.blocks, 1),
        threadgroup=(gemm.threads, 1, 1),
        output_shapes=[(rows, gemm.outputs)],
        output_dtypes=[mx.bfloat16],
    )[0]


def skinny_gemm(rows: int, weight: Packed) -> SkinnyGemm:
    """Return how a product of `rows` rows with a matrix is cut."""
    outputs, words = weight.codes.shape
    return _cut(words * 8, outputs, weight.group_size, rows=1 << max(3, (rows - 1).bit_length()))


def expert_gemms(gate: Packed, down: Packed) -> tuple[SkinnyGemm, SkinnyGemm]:
    """Return the kernels for gate and up projections, and for the down projection."""
    outputs, hidden = gate.codes.shape[1], down.codes.shape[1]
    return (
        _cut(hidden, outputs, gate.group_size, rows=_SKINNY_TILE, gated=True, experts=True),
        _cut(outputs, hidden, down.group_size, rows=_SKINNY_TILE, experts=True),
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
) -> SkinnyGemm:
    """Return how a product is cut. Cached, because it is looked up at each product."""
    return SkinnyGemm(
        inputs, outputs, group_size, rows=rows, card=card(), gated=gated, experts=experts
    )


@cache
def fits(gemm: SkinnyGemm) -> bool:
    """Return whether the card has enough shared memory. Log once if not."""
    if not gemm.fits:
        log.warning(
            "products of %d rows and %d columns use MLX's kernels: Quire's need %d bytes of "
            "shared memory, and the card has %d",
            *(gemm.rows, gemm.inputs, gemm.shared, gemm.card.shared),
        )
    return gemm.fits


def many_rows(x: mx.array, weight: Packed, up: Packed | None = None, gelu: int = 0) -> mx.array:
    """Multiply many rows, `[M, in]` -> `[M, out]`; with `up`, return `activation(weight(x)) *
    up(x)`.
    """
    rows, (outputs, words) = x.shape[0], weight.codes.shape
    second = [] if up is None else [up.codes, up.scales, up.biases]
    most = max(ROWS, 1 << (rows - 1).bit_length())
    gemm = wide_gemm(words * 8, outputs, weight.group_size, rows=most, gated=up is not None)
    return _wide_kernel(gemm, 1, gelu)(
        inputs=[x, weight.codes, weight.scales, weight.biases, *second],
        grid=(-(-outputs // gemm.width) * gemm.threads, gemm.blocks_for(rows), 1),
        threadgroup=(gemm.threads, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[mx.bfloat16],
    )[0]


def unpacked(weight: Packed) -> mx.array:
    """Return the matrix `[out, in]` unpacked."""
    outputs, words = weight.codes.shape
    return _unpack_kernel(weight.group_size)(
        inputs=[weight.codes, weight.scales, weight.biases],
        grid=(-(-outputs * words // _LANES) * _LANES, 1, 1),
        threadgroup=(_LANES, 1, 1),
        output_shapes=[(outputs, words * 8)],
        output_dtypes=[mx.bfloat16],
    )[0]


def gated(x: mx.array, y: mx.array, gelu: int) -> mx.array:
    """Return `activation(x) * y` of arrays of one shape, whose size is a multiple of 8."""
    return _gate_kernel(gelu)(
        inputs=[x.reshape(-1, 8), y.reshape(-1, 8)],
        grid=(-(-x.size // 8 // _LANES) * _LANES, 1, 1),
        threadgroup=(_LANES, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[mx.bfloat16],
    )[0]


def experts(
    x: mx.array, chosen: mx.array, matrices: tuple[Packed, Packed, Packed], gelu: int
) -> mx.array:
    gate, up, down = matrices
    top, pairs, count = chosen.shape[-1], chosen.size, gate.codes.shape[0]
    many = pairs > _SKINNY_TILE * count
    tile = ROWS if many else _SKINNY_TILE
    most = min(pairs, count + pairs // tile)
    order, tiles = _group_kernel(count, tile)(
        inputs=[chosen.reshape(-1)],
        grid=(_GROUP_LANES, 1, 1),
        threadgroup=(_GROUP_LANES, 1, 1),
        output_shapes=[(pairs,), (most, 3)],
        output_dtypes=[mx.int32, mx.int32],
    )
    gemms = (
        _wide_expert_gemms(gate, down, 1 << (most - 1).bit_length())
        if many
        else expert_gemms(gate, down)
    )
    inputs = [x, gate.codes, gate.scales, gate.biases, up.codes, up.scales, up.biases, order, tiles]
    inner = _expert_product(inputs, gemms[0], pairs=pairs, tiles=most, top=top, gelu=gelu)
    inputs = [inner, down.codes, down.scales, down.biases, order, tiles]
    y = _expert_product(inputs, gemms[1], pairs=pairs, tiles=most)
    return y.reshape(-1, top, gemms[1].outputs)


def _wide_expert_gemms(gate: Packed, down: Packed, tiles: int) -> tuple[Wide, Wide]:
    outputs, hidden = gate.codes.shape[1], down.codes.shape[1]
    return (
        wide_gemm(hidden, outputs, gate.group_size, rows=ROWS * tiles, gated=True, experts=True),
        wide_gemm(outputs, hidden, down.group_size, rows=ROWS * tiles, experts=True),
    )


@cache
def wide_gemm(
    inputs: int,
    outputs: int,
    group_size: int,
    rows: int,
    gated: bool = False,
    experts: bool = False,
) -> Wide:
    """Return how a product of many rows is cut. Cached, because it is looked up at each product."""
    cut = inputs, outputs, 4, group_size, rows, card(), gated, experts
    return WarpgroupGemm(*cut) if card().warpgroups else WideGemm(*cut)


def _expert_product(
    inputs: list[mx.array],
    gemm: SkinnyGemm | Wide,
    *,
    pairs: int,
    tiles: int,
    top: int = 1,
    gelu: int = 0,
) -> mx.array:
    """Return `[pairs, outputs]`, a row for each pair of row and expert.

    Args:
        tiles: thread blocks along the rows.
        top: number of pairs that share a row of the input.
        gelu: the activation, see `ACTIVATIONS`; used with a gate only.
    """
    return _expert_kernel(gemm, top, gelu)(
        inputs=inputs,
        grid=(-(-gemm.outputs // gemm.width) * gemm.threads, tiles, 1),
        threadgroup=(gemm.threads, 1, 1),
        output_shapes=[(pairs, gemm.outputs)],
        output_dtypes=[mx.bfloat16],
    )[0]


# -- kernels ---------------------------------------------------------------------------------------


def product_functions() -> str:
    """Return the functions that all kernels of products call."""
    return "".join(kernel_text(_PACKAGE, name) for name in ("lanes.cuh", "common.cuh"))


def header(defines: dict[str, int], functions: str = "") -> str:
    """Return the declarations that precede a kernel's source, and functions that it calls."""
    lines = ["#include <cuda_bf16.h>", *(f"#define {name} {n}" for name, n in defines.items())]
    text = "\n".join([*lines, "typedef __nv_bfloat16 T;", ""])
    return text + product_functions() + functions


@cache
def _linear_kernel(gemm: SkinnyGemm) -> Kernel:
    names = ["x", "w", "scales", "biases"]
    return _compiled(
        "skinny_gemm", names, ["y"], defines=gemm.defines | {"GELU": 0}, shared=gemm.shared
    )


@cache
def _unpack_kernel(group_size: int) -> Kernel:
    return _compiled(
        "unpack", ["w", "scales", "biases"], ["y"], defines={"GROUP": group_size, "GELU": 0}
    )


@cache
def _gate_kernel(gelu: int) -> Kernel:
    return _compiled("gate", ["gate", "up"], ["y"], defines={"GELU": gelu})


@cache
def _expert_kernel(gemm: SkinnyGemm | Wide, top: int, gelu: int) -> Kernel:
    if isinstance(gemm, WideGemm | WarpgroupGemm):
        return _wide_kernel(gemm, top, gelu)
    defines = gemm.defines | {"GATED": int(gemm.gated), "TOP": top, "GELU": gelu}
    inputs = [*_matrices(gemm.gated), "order", "tiles"]
    return _compiled("skinny_gemm", inputs, ["y"], defines=defines, shared=gemm.shared)


@cache
def _wide_kernel(gemm: Wide, top: int, gelu: int) -> Kernel:
    inputs = [*_matrices(gemm.gated), *["order", "tiles"] * gemm.experts]
    defines = gemm.defines | {"TOP": top, "GELU": gelu}
    functions = gemm.functions if isinstance(gemm, WarpgroupGemm) else ""
    name = gemm.source.removesuffix(".cuh")
    return _compiled(name, inputs, ["y"], defines=defines, shared=gemm.shared, functions=functions)


def _matrices(gated: bool) -> list[str]:
    second = ["w_up", "scales_up", "biases_up"] if gated else []
    return ["x", "w", "scales", "biases", *second]


@cache
def _group_kernel(experts: int, tile: int) -> Kernel:
    defines = {"EXPERT_COUNT": experts, "TILE": tile, "GELU": 0}
    return _compiled("group", ["chosen"], ["order", "tiles"], defines=defines)


def _compiled(
    name: str,
    inputs: list[str],
    outputs: list[str],
    defines: dict[str, int],
    shared: int = 0,
    functions: str = "",
) -> Kernel:
    own = "_".join(str(n) for n in defines.values())
    body = kernel_text(_PACKAGE, f"{name}.cuh")
    return cuda_kernel(
        f"quire_{name}_{own}",
        inputs,
        outputs,
        body=body,
        header=header(defines, functions),
        shared_memory=shared,
    )
