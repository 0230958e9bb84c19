"""The sources of products, which multiply the rows of a step by matrices on tensor cores."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from quire.device.cuda.inboxes import Inboxes
from quire.device.cuda.packed import ACTIVATIONS, product_functions
from quire.device.cuda.row_layout import RowLayout
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.cuda.warpgroup_gemm import WarpgroupGemm, copies_boxes
from quire.device.cuda.wide_gemm import WideGemm
from quire.device.gpu_kernels import kernel_text
from quire.executor.graphs.products.product_endings import ProductEnding
from quire.executor.graphs.ranks.rank_sums import rank_constants, sending_functions
from quire.executor.graphs.source import literal, written_source

_PRODUCTS = "quire.device.cuda"
Gemm = SkinnyGemm | WideGemm | WarpgroupGemm

WEIGHT_PARTS = {"w": "const unsigned*", "scales": "const Scale*", "biases": "const T*"}
"""Names of a matrix's parameters in kernels: codes, scales and biases; a plain matrix has only the
first.
"""


def linear(
    gemm: Gemm,
    outputs: tuple[int, ...],
    *,
    offsets: bool,
    inboxes: Inboxes | None = None,
    eps: float | None = None,
    ending: ProductEnding | None = None,
) -> str:
    """Return the source of a product.

    Parameters: rows, `rows_of`, then weight, y and, with `offsets`, a bias (or 0) for each matrix;
    of `WarpgroupGemm` with `sharing`, sums and flags; the table of `inboxes`. With an `ending` its
    own, and no y.

    Args:
        inboxes: to which `SkinnyGemm` sends the rows of its one matrix; None if it sends none.
        eps: see `rows_of`.
        ending: what `SkinnyGemm` computes of the only row's products, instead of storing them.
    """
    parameters = ["const int* rows", *rows_of(eps)]
    for n in range(len(outputs)):
        parameters += _weight(gemm, str(n))
        parameters += [*[f"T* y{n}"] * (ending is None), *[f"const T* offsets{n}"] * offsets]
    weight = _parts_of(gemm)
    names = [*weight, *["y"] * (ending is None), *["offsets"] * offsets]
    kinds = {name: WEIGHT_PARTS[name] for name in weight} | {"y": "T*", "offsets": "const T*"}
    chosen = [f"int outputs = {outputs[0]};", "[[maybe_unused]] int matrix = 0;"]
    chosen += [f"[[maybe_unused]] {kinds[name]} {name} = {name}0;" for name in names]
    for n, before in enumerate(parts(gemm, outputs)[:-1], 1):
        chosen += [
            f"if (part >= {before}) {{ part -= {before}; outputs = {outputs[n]}; matrix = {n};",
            *(f"{name} = {name}{n};" for name in names),
        ]
    chosen += ["}" * (len(outputs) - 1)]
    more: dict[str, object] = {"GELU": 0, "OFFSETS": int(offsets), **_scaling(eps)}
    functions = ""
    if inboxes is not None:
        parameters.append("const long long* inboxes")
        more |= {"SENDS": 1, **rank_constants(inboxes)}
        functions = sending_functions()
    if ending is not None:
        parameters += ending.parameters
        more |= ending.defines
        functions = kernel_text(_PRODUCTS, "rows.cuh")
    lines, words = ["const int x_shape[1] = {*rows};"], _words(gemm)
    if isinstance(gemm, WarpgroupGemm):
        more["W_TILES"] = sum(parts(gemm, outputs))
        more["MATRIX(tile)"] = " ".join(["int part = tile;", *chosen, "const int N = outputs;"])
        lines += [f"const int w_shape[2] = {{0, {words}}};"]
    else:
        more["TILE_X"] = "part"
        lines += ["int part = blockIdx.x;", *chosen]
        lines += [f"const int w_shape[2] = {{outputs, {words}}};"]
    return _product(parameters, lines, gemm, more=more, functions=functions)


def rows_of(eps: float | None) -> list[str]:
    """Return the parameters of the rows that a product reads: the rows and, where a norm has not
    scaled them, their sums of squares.

    Args:
        eps: of that norm; None where rows are scaled.
    """
    return ["const T* x", *["const float* squares"] * (eps is not None)]


def _scaling(eps: float | None) -> dict[str, object]:
    return {} if eps is None else {"UNSCALED": 1, "EPS": literal(eps, mx.float32)}


def by_head(gemm: Gemm, heads: int, x_row: int, x_head: int) -> str:
    """Return the source of products by head. Parameters: rows, x, weight, y. Each head has its own
    matrix.

    Args:
        x_row, x_head: elements from one row, and from one head, of x to the next.
    """
    parameters = ["const int* rows", "const T* x", *_weight(gemm), "T* y"]
    words, groups = _words(gemm), gemm.inputs // gemm.group_size
    lines = [
        "const int x_shape[1] = {*rows};",
        f"const int w_shape[2] = {{{gemm.outputs}, {words}}};",
        f"w += (size_t)blockIdx.z * {gemm.outputs * words};",
        f"x += (size_t)blockIdx.z * {x_head};",
        f"y += (size_t)blockIdx.z * {gemm.outputs};",
    ]
    lines += [
        f"{name} += (size_t)blockIdx.z * {gemm.outputs * groups};" for name in _parts_of(gemm)[1:]
    ]
    more = {"GELU": 0, "X_ROW": x_row, "Y_ROW": heads * gemm.outputs}
    return _product(parameters, lines, gemm, more=more)


def parts(gemm: Gemm, outputs: tuple[int, ...]) -> list[int]:
    """Return how many thread blocks share each matrix."""
    return [-(-n // gemm.width) for n in outputs]


def gated(
    gemm: Gemm,
    activation: str,
    others: int = 0,
    stores_digits: bool = False,
    eps: float | None = None,
) -> str:
    """Return the source of a product and its gate.

    Parameters: rows, `rows_of`, weights of gate and up, y, and y's digits if they are wanted; of
    `WarpgroupGemm` with `sharing`, sums and flags. Where the gate multiplies other rows: rows,
    `rows_of`, weight, y, and these.

    Args:
        others: elements from one of the other rows to the next, of `SkinnyGemm`; 0 without them.
        stores_digits: whether y is also written as digits, of `SkinnyGemm`.
        eps: see `rows_of`.
    """
    parameters = ["const int* rows", *rows_of(eps)]
    parameters += _weight(gemm) if others else _gate_and_up(gemm)
    parameters += ["T* y", *["const T* others"] * bool(others), *_digits(stores_digits)]
    lines = [
        "const int x_shape[1] = {*rows};",
        f"const int w_shape[2] = {{{gemm.outputs}, {_words(gemm)}}};",
    ]
    more: dict[str, object] = {"GELU": ACTIVATIONS[activation], "OTHERS": others}
    more |= {"STORES_DIGITS": int(stores_digits), **_scaling(eps)}
    if isinstance(gemm, WarpgroupGemm):
        more["W_TILES"] = -(-gemm.outputs // gemm.width)
        more["MATRIX(tile)"] = f"const int part = tile, N = {gemm.outputs};"
    return _product(parameters, lines, gemm, more=more)


def experts_first(
    gemm: Gemm,
    experts: int,
    top: int,
    *,
    joined: str | None,
    activation: str,
    offsets: bool,
    tiles: int,
    layout: RowLayout | None = None,
    eps: float | None = None,
    counts: bool = False,
) -> str:
    """Return the source of the experts' first products.

    Parameters: `rows_of`, weights of one matrix or of gate and up, offsets, order, tiles, y, and
    y's digits if that is its layout.

    Args:
        top: number of experts of a row.
        joined: C expression that joins products `x` and `y` (with a gate); None uses the
            activation.
        offsets: whether each matrix has a bias.
        tiles: the most tiles.
        layout: of the pairs' rows, as the last products read them: `SkinnyGemm` also writes their
            digits, `WarpgroupGemm` writes y as interleaved rows.
        eps: see `rows_of`.
        counts: whether `SkinnyGemm` counts the thread blocks that have stored a tile.
    """
    digits = layout is RowLayout.DIGITS
    parameters = [*rows_of(eps), *(_gate_and_up(gemm) if gemm.gated else _weight(gemm))]
    if offsets:
        parameters += ["const T* offsets", "const T* offsets_up"][: 1 + gemm.gated]
    parameters += ["const int* order", "const int* tiles", "T* y", *_digits(digits)]
    more: dict[str, object] = {"TOP": top, "FIRST": 1, "OFFSETS": int(offsets), **_scaling(eps)}
    more["TILE_COUNTS"] = int(counts)
    more["STORES_DIGITS"] = int(digits)
    more["Y_INTERLEAVED"] = int(layout is RowLayout.INTERLEAVED)
    more["GELU"] = ACTIVATIONS.get(activation, 0)
    head = ""
    if joined is not None:
        more["JOINED(sums)"] = f"joined(sums[0], sums[{int(gemm.gated)}])"
        lines = ["__device__ __forceinline__ float joined(float x, float y) {"]
        lines += ["  x = as_bfloat16(x), y = as_bfloat16(y);", f"  return {joined};", "}\n"]
        head = kernel_text(_PRODUCTS, "rows.cuh") + "\n".join(lines)
    return _experts(parameters, gemm, experts, tiles=tiles, more=more, head=head)


def experts_down(
    gemm: Gemm, experts: int, *, offsets: bool = False, tiles: int, counted: int = 0
) -> str:
    """Return the source of the experts' last product.

    Parameters: x, weight, offsets if there are any, order, tiles, y.

    Args:
        tiles: the most tiles.
        counted: thread blocks of the first products for each tile, which `SkinnyGemm` awaits; 0 if
            they are not counted.
    """
    parameters = ["const T* x", *_weight(gemm), *["const T* offsets"] * offsets]
    parameters += ["const int* order", "const int* tiles", "T* y"]
    more = {"GELU": 0, "TOP": 1, "OFFSETS": int(offsets), "TILE_COUNTS": counted}
    return _experts(parameters, gemm, experts, tiles=tiles, more=more)


def _digits(are_stored: bool) -> list[str]:
    """Return the parameter of a result's digits."""
    return ["uint4* digits"] * are_stored


def _gate_and_up(gemm: Gemm) -> list[str]:
    return [*_weight(gemm), *_weight(gemm, "_up")]


def _parts_of(gemm: Gemm) -> list[str]:
    """Return the names of a matrix's parameters."""
    return list(WEIGHT_PARTS)[: 1 if gemm.bits == 16 else 3 if gemm.mode == "affine" else 2]


def _weight(gemm: Gemm, suffix: str = "") -> list[str]:
    """Return the parameters of one matrix, as `Recorder.matrix` gives them."""
    return [f"{WEIGHT_PARTS[name]} {name}{suffix}" for name in _parts_of(gemm)]


def _words(gemm: Gemm) -> int:
    return gemm.inputs * gemm.bits // 32


def _experts(
    parameters: list[str],
    gemm: Gemm,
    experts: int,
    *,
    tiles: int,
    more: Mapping[str, object],
    head: str = "",
) -> str:
    lines = [f"const int w_shape[3] = {{{experts}, {gemm.outputs}, {_words(gemm)}}};"]
    lines.append(f"const int tiles_shape[2] = {{{tiles}, 3}};")
    return _product(parameters, lines, gemm, more=more, functions=head)


def _product(
    parameters: list[str],
    lines: list[str],
    gemm: Gemm,
    more: Mapping[str, object],
    functions: str = "",
) -> str:
    head, body = product_functions(), kernel_text(_PRODUCTS, gemm.source)
    reads = isinstance(gemm, SkinnyGemm) and gemm.layout is not None
    if reads or more.get("STORES_DIGITS") or "ENDS" in more:
        head += kernel_text(_PRODUCTS, "digits.cuh") + kernel_text(_PRODUCTS, "byte_product.cuh")
    if isinstance(gemm, WarpgroupGemm):
        head += gemm.functions
        parameters = [*parameters, *["float* sums", "unsigned* flags"] * gemm.sharing]
        parameters += ["const void* x_map"] * copies_boxes(gemm)
    if more.get("TILE_COUNTS"):
        head += kernel_text(_PRODUCTS, "counts.cuh")
    head += functions
    # Kernels of experts' last products read the tiles before they wait for the first ones.
    late = not isinstance(gemm, WideGemm) and gemm.experts and "FIRST" in more
    ready = "wait_for_others(), others_may_start()" if late else "wait_for_others()"
    defines = {**gemm.defines, **more, "READY": ready}
    before = "\n".join(lines)
    return written_source(
        parameters,
        body,
        gemm.threads,
        defines=defines,
        head=head,
        before=before,
        resident=gemm.resident,
        starts_others=not late,
    )
