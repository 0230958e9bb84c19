"""Experts' products of gpt-oss-20b by packing and rows: `expert_products.py OUT [PACKING...]`.

A graph of 8 products, one behind the other, each with other experts: microseconds a product, GB/s
of codes and scales, and the error relative to products in float32. A step of so many rows uses as
many experts as routers that choose evenly would; `few` among the packings takes 5 experts for 8
rows, too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from wide_products import launched_us

from quire.device.cuda.compiled import compiler
from quire.device.cuda.driver import Graph, Launch, card
from quire.device.cuda.extension import load_extension
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.cuda.warpgroup_gemm import WarpgroupGemm
from quire.device.cuda.wide_gemm import WideGemm
from quire.device.weights import Packing
from quire.executor.graphs import product_kernels
from quire.executor.graphs.product_kernels import Gemm
from quire.executor.graphs.recorder import expert_tile, most_skinny_pairs

SIZE, EXPERTS, TOP = 2880, 32, 4
LAUNCHES, ROUNDS = 8, 12
PACKINGS = {
    "affine-4": Packing(64, 4, "affine"),
    "mxfp4": Packing(32, 4, "mxfp4"),
    "nvfp4": Packing(16, 4, "nvfp4"),
    "affine-8": Packing(64, 8, "affine"),
    "mxfp8": Packing(32, 8, "mxfp8"),
}
USED = {1: 4, 2: 7, 8: 21, 32: 32, 64: 32, 128: 32, 256: 32}
"""Experts that so many rows use."""
FEW = 8, 5

Matrices = tuple[Sequence[mx.array], Sequence[mx.array]]


@dataclass(frozen=True)
class Product:
    """A product of rows with their experts' matrices.

    Attributes:
        used: experts that the rows choose.
        gated: by both matrices of a gate, or by one matrix.
        tile: most pairs of row and expert in a tile.
        gemm: the kernel.
    """

    packing: Packing
    rows: int
    used: int
    gated: bool
    tile: int
    gemm: Gemm

    @property
    def pairs(self) -> int:
        return self.rows * TOP

    @property
    def source(self) -> str:
        if self.gated:
            return product_kernels.experts_first(
                self.gemm, EXPERTS, TOP, None, "silu", offsets=False
            )
        return product_kernels.experts_down(self.gemm, EXPERTS)

    @property
    def grid(self) -> tuple[int, int, int]:
        return -(-SIZE // self.gemm.width), max_tiles(self.pairs, self.tile), 1


def max_tiles(pairs: int, tile: int) -> int:
    return min(pairs, EXPERTS + pairs // tile)


def product(packing: Packing, rows: int, used: int, *, gated: bool) -> Product:
    """Return a product as graphs compute it."""
    tile = expert_tile(card(), rows * TOP, EXPERTS)
    return Product(packing, rows, used, gated, tile, _gemm(packing, rows, tile, gated=gated))


def _gemm(packing: Packing, rows: int, tile: int, *, gated: bool) -> Gemm:
    bits, group_size, mode = packing.bits, packing.group_size, packing.mode
    if tile <= most_skinny_pairs(SIZE * SIZE, bits):
        own = {"bits": bits, "mode": mode, "tile": tile}
        return SkinnyGemm(SIZE, SIZE, group_size, rows, card(), gated, experts=True, **own)
    cut = SIZE, SIZE, bits, group_size, tile * max_tiles(rows * TOP, tile), card(), gated, True
    return WarpgroupGemm(*cut, mode, tile) if card().warpgroups else WideGemm(*cut, mode)


def matrices(packing: Packing) -> Matrices:
    """Draw two stacks of matrices. A gate has both, a product by one matrix has the second."""
    found = []
    for _ in range(2):
        whole = mx.random.normal((EXPERTS, SIZE, SIZE)).astype(mx.bfloat16) * SIZE**-0.5
        found.append(
            mx.quantize(whole, group_size=packing.group_size, bits=packing.bits, mode=packing.mode)
        )
        mx.eval(found[-1])
    return found[0], found[1]


def tiles_of(each: Product, first: int) -> mx.array:
    """Return the tiles of pairs that `used` experts from `first` on share evenly."""
    tiles, begin = list[tuple[int, int, int]](), 0
    for n in range(each.used):
        end = begin + each.pairs // each.used + (n < each.pairs % each.used)
        expert = (first + n) % EXPERTS
        for place in range(begin, end, each.tile):
            tiles.append((expert, place, min(each.tile, end - place)))
        begin = end
    tiles += [(0, 0, 0)] * (each.grid[1] - len(tiles))
    return mx.array(np.array(tiles, np.int32))


def measured(each: Product, drawn: Matrices) -> dict[str, Any]:
    """Time a product within a graph of them."""
    address = load_extension().pointer
    x = mx.random.normal((each.rows if each.gated else each.pairs, SIZE)).astype(mx.bfloat16)
    y, order = mx.zeros((each.pairs, SIZE), mx.bfloat16), mx.arange(each.pairs, dtype=mx.int32)
    tiles = [tiles_of(each, n * each.used) for n in range(LAUNCHES)]
    mx.eval(x, y, order, tiles)
    arrays = [*drawn[0], *drawn[1]] if each.gated else [*drawn[1]]
    (function,) = compiler().functions([each.source])
    launches = [
        Launch(
            function,
            each.grid,
            each.gemm.threads,
            shared=each.gemm.shared,
            arguments=tuple(map(address, [x, *arrays, order, own, y])),
            after=(n - 1,) if n else (),
        )
        for n, own in enumerate(tiles)
    ]
    us = _microseconds(Graph(launches))
    read = each.used * (1 + each.gated) * sum(array[0].nbytes for array in drawn[0])
    error = _error(each, x, y, drawn, tiles[-1])
    return {"us": round(us, 1), "GB/s": round(read / us / 1e3), "error": round(error, 5)}


def _microseconds(graph: Graph) -> float:
    """Return the time of one of a graph's launches, the least of three rounds."""
    launched_us(graph, 3)
    return min(launched_us(graph, ROUNDS) for _ in range(3)) / LAUNCHES


def _error(each: Product, x: mx.array, y: mx.array, drawn: Matrices, tiles: mx.array) -> float:
    """Return the error of the first tile of the last launch."""
    expert, first, count = np.array(tiles)[0].tolist()
    places = mx.arange(first, first + count)
    rows = x[places // TOP if each.gated else places].astype(mx.float32)
    packing = each.packing
    left, right = (
        rows
        @ mx.dequantize(
            *(array[expert] for array in arrays),
            group_size=packing.group_size,
            bits=packing.bits,
            mode=packing.mode,
        )
        .astype(mx.float32)
        .T
        for arrays in drawn
    )
    expected = left * mx.sigmoid(left) * right if each.gated else right
    difference = y[first : first + count].astype(mx.float32) - expected
    return float((mx.linalg.norm(difference) / mx.linalg.norm(expected)).item())


def compile_all(products: Sequence[Product]) -> None:
    while not compiler().start([each.source for each in products]):
        time.sleep(0.1)


def main(out: Path, names: list[str]) -> None:
    cases = [*USED.items(), *[FEW] * ("few" in names)]
    named = {name: each for name, each in PACKINGS.items() if name in names} or PACKINGS
    every = {
        name: [
            product(packing, rows, used, gated=gated)
            for rows, used in cases
            for gated in (True, False)
        ]
        for name, packing in named.items()
    }
    compile_all([each for products in every.values() for each in products])
    rows = []
    for name, products in every.items():
        drawn = matrices(named[name])
        for each in products:
            facts = {"packing": name, "rows": each.rows, "experts": each.used, "gated": each.gated}
            rows.append(facts | {"cut": str(each.gemm.cut)} | measured(each, drawn))
            print(*rows[-1].values(), flush=True)
        del drawn
        mx.clear_cache()
    device = mx.device_info().get("device_name")
    out.write_text(json.dumps({"device": device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
