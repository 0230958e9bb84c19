"""Kernels that multiply by packed weights, and how they are launched."""

from __future__ import annotations

import logging
from functools import cache

import mlx.core as mx

from quire.device.cuda.driver import card
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.cuda.warpgroup_gemm import WarpgroupGemm
from quire.device.cuda.wide_gemm import ROWS, WideGemm
from quire.device.gpu_kernels import Kernel, cuda_kernel, kernel_text
from quire.device.weights import PackedWeight, Packing

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


def linear(x: mx.array, weight: PackedWeight) -> mx.array:
    """Multiply rows: `[M, in]` -> `[M, out]`."""
    rows = x.shape[0]
    if rows > SKINNY_ROWS:
        return many_rows(x, weight)
    gemm = skinny_gemm(rows, weight)
    blocks = -(-gemm.outputs // gemm.width), gemm.blocks
    inputs = [x, *_arrays(weight)]
    kernel, shape = _linear_kernel(gemm), (rows, gemm.outputs)
    return _launched(kernel, inputs, shape, blocks=blocks, threads=gemm.threads)


def _launched(
    kernel: Kernel,
    inputs: list[mx.array],
    shape: tuple[int, ...],
    *,
    blocks: tuple[int, int],
    threads: int,
) -> mx.array:
    """Return the only output of a kernel, bfloat16.

    Args:
        shape: of the output.
        blocks: numbers of thread blocks along two axes.
        threads: of a thread block.
    """
    return kernel(
        inputs=inputs,
        grid=(blocks[0] * threads, blocks[1], 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape],
        output_dtypes=[mx.bfloat16],
    )[0]


def skinny_gemm(rows: int, weight: PackedWeight) -> SkinnyGemm:
    """Return how a product of `rows` rows with a matrix is cut."""
    rounded = 1 << max(3, (rows - 1).bit_length())
    return _cut(_columns(weight), weight.codes.shape[0], weight.packing, rows=rounded)


def _arrays(weight: PackedWeight) -> list[mx.array]:
    """Return the arrays of a matrix, in the order of `_matrices`."""
    return [weight.codes, weight.scales, *([] if weight.biases is None else [weight.biases])]


def _columns(weight: PackedWeight) -> int:
    return weight.codes.shape[-1] * 32 // weight.packing.bits


def expert_gemm(weight: PackedWeight, *, gated: bool = False) -> SkinnyGemm:
    """Return how a product of few rows with experts' matrices is cut."""
    inputs, outputs = _columns(weight), weight.codes.shape[1]
    return _cut(inputs, outputs, weight.packing, rows=_SKINNY_TILE, gated=gated, experts=True)


@cache
def _cut(
    inputs: int,
    outputs: int,
    packing: Packing,
    rows: int,
    *,
    gated: bool = False,
    experts: bool = False,
) -> SkinnyGemm:
    """Return how a product is cut. Cached, because it is looked up at each product."""
    return SkinnyGemm(
        inputs,
        outputs,
        packing.group_size,
        rows=rows,
        card=card(),
        gated=gated,
        experts=experts,
        bits=packing.bits,
        mode=packing.mode,
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


def many_rows(
    x: mx.array, weight: PackedWeight, up: PackedWeight | None = None, gelu: int = 0
) -> mx.array:
    """Multiply many rows, `[M, in]` -> `[M, out]`; with `up`, return `activation(weight(x)) *
    up(x)`.
    """
    rows, outputs = x.shape[0], weight.codes.shape[0]
    most = max(ROWS, 1 << (rows - 1).bit_length())
    gemm = wide_gemm(_columns(weight), outputs, weight.packing, rows=most, gated=up is not None)
    inputs = [x, *_arrays(weight), *([] if up is None else _arrays(up))]
    blocks = -(-outputs // gemm.width), gemm.blocks_for(rows)
    kernel = _wide_kernel(gemm, 1, gelu)
    return _launched(kernel, inputs, (rows, outputs), blocks=blocks, threads=gemm.threads)


def unpacked(weight: PackedWeight) -> mx.array:
    """Return a matrix `[out, in]` in affine codes of 4 bits unpacked."""
    outputs, words = weight.codes.shape
    kernel, blocks = _unpack_kernel(weight.packing.group_size), -(-outputs * words // _LANES)
    shape, inputs = (outputs, words * 8), _arrays(weight)
    return _launched(kernel, inputs, shape, blocks=(blocks, 1), threads=_LANES)


def gated(x: mx.array, y: mx.array, gelu: int) -> mx.array:
    """Return `activation(x) * y` of arrays of one shape, whose size is a multiple of 8."""
    inputs, blocks = [x.reshape(-1, 8), y.reshape(-1, 8)], -(-x.size // 8 // _LANES)
    return _launched(_gate_kernel(gelu), inputs, x.shape, blocks=(blocks, 1), threads=_LANES)


def experts(
    x: mx.array,
    chosen: mx.array,
    matrices: tuple[PackedWeight, PackedWeight, PackedWeight],
    gelu: int,
) -> mx.array:
    """Return the outputs `[T, k, hidden]` of experts without biases, by two products."""
    gate, up, down = matrices
    order, tiles, tile = _grouped(chosen, gate.codes.shape[0])
    gemms = _expert_cut(gate, tiles, tile, gated=True), _expert_cut(down, tiles, tile)
    inputs = [x, *_arrays(gate), *_arrays(up), order, tiles]
    inner = _expert_product(inputs, gemms[0], top=chosen.shape[-1], gelu=gelu)
    y = _expert_product([inner, *_arrays(down), order, tiles], gemms[1])
    return y.reshape(*chosen.shape, gemms[1].outputs)


def expert_product(x: mx.array, chosen: mx.array, weight: PackedWeight) -> mx.array:
    """Multiply rows `[T, in]` or `[T, k, in]` by their experts `[T, k]`: `[T, k, out]`."""
    order, tiles, tile = _grouped(chosen, weight.codes.shape[0])
    gemm = _expert_cut(weight, tiles, tile)
    rows = x[order // chosen.shape[-1]] if x.ndim == 2 else x.flatten(0, 1)[order]
    y = _expert_product([rows, *_arrays(weight), order, tiles], gemm)
    return y.reshape(*chosen.shape, gemm.outputs)


def _grouped(chosen: mx.array, experts: int) -> tuple[mx.array, mx.array, int]:
    """Group pairs of row and expert by expert, in tiles.

    Returns:
        The pairs `[n]`; expert, first pair and number of pairs of each tile; most pairs of a tile.
    """
    pairs = chosen.size
    tile = ROWS if pairs > _SKINNY_TILE * experts else _SKINNY_TILE
    order, tiles = _group_kernel(experts, tile)(
        inputs=[chosen.reshape(-1)],
        grid=(_GROUP_LANES, 1, 1),
        threadgroup=(_GROUP_LANES, 1, 1),
        output_shapes=[(pairs,), (min(pairs, experts + pairs // tile), 3)],
        output_dtypes=[mx.int32, mx.int32],
    )
    return order, tiles, tile


def _expert_cut(
    weight: PackedWeight, tiles: mx.array, tile: int, *, gated: bool = False
) -> SkinnyGemm | Wide:
    """Return how a product with experts' matrices is cut."""
    if tile == _SKINNY_TILE:
        return expert_gemm(weight, gated=gated)
    rows = ROWS << (len(tiles) - 1).bit_length()
    inputs, outputs = _columns(weight), weight.codes.shape[1]
    return wide_gemm(inputs, outputs, weight.packing, rows=rows, gated=gated, experts=True)


@cache
def wide_gemm(
    inputs: int,
    outputs: int,
    packing: Packing,
    rows: int,
    *,
    gated: bool = False,
    experts: bool = False,
) -> Wide:
    """Return how a product of many rows is cut. Cached, because it is looked up at each product."""
    sizes = inputs, outputs, packing.bits, packing.group_size
    cut = *sizes, rows, card(), gated, experts, packing.mode
    return WarpgroupGemm(*cut) if card().warpgroups else WideGemm(*cut)


def _expert_product(
    inputs: list[mx.array], gemm: SkinnyGemm | Wide, *, top: int = 1, gelu: int = 0
) -> mx.array:
    """Return `[pairs, outputs]`, a row for each pair of row and expert.

    Args:
        inputs: those of the kernel. The last two are the grouped pairs.
        top: number of pairs that share a row of the input.
        gelu: the activation, see `ACTIVATIONS`; used with a gate only.
    """
    *_, order, tiles = inputs
    parts, blocks, _ = gemm.grid(-(-gemm.outputs // gemm.width), len(tiles))
    kernel, shape = _expert_kernel(gemm, top, gelu), (len(order), gemm.outputs)
    return _launched(kernel, inputs, shape, blocks=(parts, blocks), threads=gemm.threads)


# -- kernels ---------------------------------------------------------------------------------------


def product_functions() -> str:
    """Return the functions that all kernels of products call."""
    names = "lanes.cuh", "interleaved.cuh", "common.cuh"
    return "".join(kernel_text(_PACKAGE, name) for name in names)


def header(defines: dict[str, int], functions: str = "") -> str:
    """Return the declarations that precede a kernel's source, and functions that it calls."""
    lines = ["#include <cuda_bf16.h>", *(f"#define {name} {n}" for name, n in defines.items())]
    text = "\n".join([*lines, "typedef __nv_bfloat16 T;", ""])
    return text + product_functions() + functions


@cache
def _linear_kernel(gemm: SkinnyGemm) -> Kernel:
    return _compiled(
        "skinny_gemm",
        _matrices(gemm),
        ["y"],
        defines=gemm.defines | {"GELU": 0},
        shared=gemm.shared,
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
    inputs = [*_matrices(gemm), "order", "tiles"]
    return _compiled("skinny_gemm", inputs, ["y"], defines=defines, shared=gemm.shared)


@cache
def _wide_kernel(gemm: Wide, top: int, gelu: int) -> Kernel:
    inputs = [*_matrices(gemm), *["order", "tiles"] * gemm.experts]
    defines = gemm.defines | {"TOP": top, "GELU": gelu}
    functions = gemm.functions if isinstance(gemm, WarpgroupGemm) else ""
    name = gemm.source.removesuffix(".cuh")
    return _compiled(name, inputs, ["y"], defines=defines, shared=gemm.shared, functions=functions)


def _matrices(gemm: SkinnyGemm | Wide) -> list[str]:
    """Return the names of a product's inputs: x, and the arrays of one matrix or of two."""
    names = ["w", "scales", *["biases"] * (gemm.mode == "affine")]
    return ["x", *names, *[f"{name}_up" for name in names * gemm.gated]]


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
