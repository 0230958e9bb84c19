"""Products by each cut of the GEMM kernels: `wide_products.py OUT [ROWS] [BITS] [CUTS]`.

A graph of 20 products, one behind the other, of four matrices in turns: microseconds a product,
TFLOPS, and the error relative to products in float32. The matrices are those of Llama 3.1 8B, in 4
bits, 8, or 16 (bfloat16). `WideGemm` and `WarpgroupGemm` choose by these times. CUTS is "all", or
"chosen" for the fastest by the tables, and in bfloat16 cuBLASLt as child graphs beside it, with the
gate's own kernel behind; and PyTorch's cuBLAS, without the gate, where PyTorch is installed.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from quire.device.activations import Gating
from quire.device.cuda import driver, warpgroup_gemm, wide_gemm
from quire.device.cuda.boxes import memory_map
from quire.device.cuda.compiled import compiler
from quire.device.cuda.cublas import LibraryProduct
from quire.device.cuda.driver import Graph, Launch
from quire.device.cuda.extension import load_extension
from quire.device.cuda.warpgroup_gemm import WarpgroupGemm, copies_boxes
from quire.device.cuda.wide_gemm import WideGemm
from quire.executor.graphs.products import product_kernels
from quire.executor.graphs.rows.regions import RowKernel, row_kernel
from quire.program.values import Form, Node, Program, Value

MATRICES = [(4096, 14_336, True), (14_336, 4096, False), (4096, 6144, False), (4096, 4096, False)]
"""Columns, rows, and whether it is a gate with its values."""
ROWS = "32,64,128,256,512"
LAUNCHES, ROUNDS = 20, 10
GROUP_SIZE = 64


@dataclass
class Product:
    """A product as one kernel cuts it: what its launch takes."""

    name: str
    rows: int
    inputs: int
    outputs: int
    bits: int
    gated: bool
    source: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    sums: int
    flags: int
    box: int
    chosen: bool
    by_library: bool = False


@cache
def matrices(inputs: int, outputs: int, gated: bool, bits: int) -> list[list[mx.array]]:
    """Draw four matrices, each as codes, scales and biases, or as it is; of gates both."""
    drawn = []
    for _ in range(4):
        arrays: list[mx.array] = []
        for _ in range(2 if gated else 1):
            whole = mx.random.normal((outputs, inputs)).astype(mx.bfloat16) * inputs**-0.5
            arrays += [whole] if bits == 16 else mx.quantize(whole, GROUP_SIZE, bits)
        mx.eval(arrays)
        drawn.append(arrays)
    return drawn


def expected(x: mx.array, arrays: list[mx.array], bits: int, gated: bool) -> mx.array:
    """Compute a product in float32."""
    each = len(arrays) // (1 + gated)
    left, right = (
        x.astype(mx.float32)
        @ (part[0] if bits == 16 else mx.dequantize(*part, GROUP_SIZE, bits)).astype(mx.float32).T
        for part in (arrays[:each], arrays[-each:])
    )
    return left * mx.sigmoid(left) * right if gated else left


def measured(product: Product) -> dict[str, Any]:
    """Time one product within a graph of them."""
    address = load_extension().pointer
    weights = matrices(product.inputs, product.outputs, product.gated, product.bits)
    x = mx.random.normal((product.rows, product.inputs)).astype(mx.bfloat16)
    y = mx.zeros((product.rows, product.outputs), mx.bfloat16)
    count = mx.array(np.array([product.rows] * 4, np.int32))
    # In a library's product, what the gate multiplies.
    together = [mx.zeros_like(y) for _ in range(2 * product.by_library * product.gated)]
    if product.sums:
        together = [mx.zeros((product.sums // 4,)), mx.zeros((product.flags,), mx.uint32)]
    if product.box:
        together.append(memory_map(product.inputs, product.box))
    mx.eval(x, y, count, weights, together)
    launches = list[Launch]()
    for number in range(LAUNCHES):
        given = [count, x, *weights[number % 4], y, *together]
        one = by_library if product.by_library else by_kernel
        launches += one(product, tuple(map(address, given)), len(launches))
    graph = Graph(launches)
    launched_us(graph, 3)
    us = launched_us(graph, ROUNDS) / LAUNCHES
    reference = expected(x, weights[(LAUNCHES - 1) % 4], product.bits, product.gated)
    error = mx.linalg.norm(y.astype(mx.float32) - reference) / mx.linalg.norm(reference)
    flops = 2 * product.rows * product.inputs * product.outputs * (1 + product.gated)
    return {"us": round(us, 1), "TFLOPS": round(flops / us / 1e6), "error": round(error.item(), 5)}


def launched_us(graph: Graph, times: int) -> float:
    """Return the microseconds of one launch of a graph, launched so many times."""
    cuda, started = driver._driver(), time.perf_counter()
    for _ in range(times):
        cuda.cuGraphLaunch(ctypes.c_void_p(graph.handle), None)
    failed = cuda.cuCtxSynchronize()
    assert not failed, f"error {failed}"
    return (time.perf_counter() - started) * 1e6 / times


def by_kernel(product: Product, addresses: tuple[int, ...], first: int) -> list[Launch]:
    """Return the launch of a product by one kernel, number `first` of a graph."""
    (function,) = compiler().functions([product.source])
    after = (first - 1,) if first else ()
    return [Launch(function, product.grid, product.threads, product.shared, addresses, after)]


def by_library(product: Product, addresses: tuple[int, ...], first: int) -> list[Launch]:
    """Return the launches of a product by cuBLASLt, and of its gate; as for `by_kernel`."""
    count, x, *others = addresses
    whole = LibraryProduct(product.rows, product.inputs, product.outputs)
    after, one = (first - 1,) if first else (), (1, 1, 1)
    if not product.gated:
        return [Launch(whole, one, 1, 0, (x, *others), after)]
    gate, up, y, *between = others
    parts = zip((gate, up), between, strict=True)
    found = [Launch(whole, one, 1, 0, (x, weight, to), after) for weight, to in parts]
    kernel = gate_kernel(product.outputs)
    (function,) = compiler().functions([kernel.text])
    arguments, last = (count, *between, y), (first, first + 1)
    grid = kernel.grid(product.rows)
    return [*found, Launch(function, grid, kernel.threads, kernel.shared, arguments, last)]


@cache
def gate_kernel(width: int) -> RowKernel:
    """Return the kernel of a gate between products that are not its own."""
    rows = Form(0, (("T", 1),))
    values = dict.fromkeys(range(3), Value((rows, width), mx.bfloat16))
    node = Node("gated", (0, 1), (2,), ("x", "y"), attributes={"gating": Gating("silu")})
    return row_kernel(Program(("T",), {"x": 0, "y": 1}, {}, values, (node,), (2,)), node)


def products(
    inputs: int, outputs: int, gated: bool, rows: int, bits: int, card: driver.Card
) -> Iterator[Product]:
    """List a product in each cut of each kernel that the card has."""
    wide = WideGemm(inputs, outputs, bits, GROUP_SIZE, rows, card, gated)
    yield from _cut("wide", wide, wide_gemm, wide.cuts()[:2])
    if card.warpgroups:
        gemm = WarpgroupGemm(inputs, outputs, bits, GROUP_SIZE, rows, card, gated, sharing=True)
        yield from _cut("warpgroup", gemm, warpgroup_gemm, gemm.cuts())


def _cut(
    kernel: str, gemm: WideGemm | WarpgroupGemm, module: Any, cuts: list[Any]
) -> Iterator[Product]:
    choose: Callable[..., Any] = module.chosen
    for cut in cuts:
        module.chosen = lambda gemm, cut=cut: cut
        if gemm.gated:
            source = product_kernels.gated(gemm, "silu")
        else:
            source = product_kernels.linear(gemm, (gemm.outputs,), offsets=False)
        grid = gemm.grid(-(-gemm.outputs // gemm.width))
        yield Product(
            f"{kernel} {cut}",
            gemm.rows,
            gemm.inputs,
            gemm.outputs,
            gemm.bits,
            gemm.gated,
            source,
            grid,
            gemm.threads,
            gemm.shared,
            gemm.sums(grid[0]) if isinstance(gemm, WarpgroupGemm) else 0,
            gemm.flags(grid[0]) if isinstance(gemm, WarpgroupGemm) else 0,
            gemm.cut.rows if isinstance(gemm, WarpgroupGemm) and copies_boxes(gemm) else 0,
            cut == cuts[0],
        )
    module.chosen = choose


def cublas(rows: int, inputs: int, outputs: int) -> float:
    """Return the microseconds of PyTorch's product in bfloat16, of four matrices in turns."""
    import torch

    drawn = [torch.randn(outputs, inputs, device="cuda").bfloat16() for _ in range(4)]
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    for n in range(4):
        x @ drawn[n].T
    with torch.cuda.graph(graph):
        for n in range(LAUNCHES):
            x @ drawn[n % 4].T
    for times in (3, ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            graph.replay()
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e6 / ROUNDS / LAUNCHES


def library_product(product: Product) -> Product:
    """Return a product as cuBLASLt computes it."""
    none = {
        "source": "",
        "grid": (1, 1, 1),
        "threads": 1,
        "shared": 0,
        "sums": 0,
        "flags": 0,
        "box": 0,
    }
    return replace(product, name="cuBLASLt", by_library=True, **none)


def main(out: Path, rows: str = ROWS, bits: str = "4", cuts: str = "all") -> None:
    card, found = driver.card(), list[dict[str, Any]]()
    listed = [
        product
        for inputs, outputs, gated in MATRICES
        for count in map(int, rows.split(","))
        for product in products(inputs, outputs, gated, count, int(bits), card)
        if cuts == "all" or (product.chosen and product.name.startswith("warpgroup"))
    ]
    compiler().functions([each.source for each in listed])
    if cuts != "all" and int(bits) == 16:
        listed = [each for own in listed for each in (own, library_product(own))]
    for each in listed:
        if cuts != "all" and not each.by_library and find_spec("torch"):
            us = cublas(each.rows, each.inputs, each.outputs * (1 + each.gated))
            found.append({"kernel": "cuBLAS", "matrix": (each.inputs, each.outputs)})
            found[-1] |= {"gated": each.gated, "rows": each.rows, "us": round(us, 1)}
            print(*found[-1].values(), flush=True)
        found.append(
            {"kernel": each.name, "matrix": (each.inputs, each.outputs), "gated": each.gated}
            | {"rows": each.rows, "bits": each.bits, "chosen": each.chosen}
            | measured(each)
        )
        print(*found[-1].values(), flush=True)
    out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
