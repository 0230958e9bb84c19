"""Experts' products by shape, packing and rows: `expert_products.py OUT [SHAPE...] [PACKING...]`.

A graph of 9 products, one behind the other: microseconds a product, GB/s of codes and scales, and
the error relative to products in float32. Each row's experts are drawn at random, so that tiles are
uneven. The matrices of three layers are used in turns, so that caches hold none.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
from quire.executor.graphs.products import product_kernels
from quire.executor.graphs.products.product_kernels import Gemm
from quire.executor.graphs.recorder import expert_tile, most_skinny_pairs

LAYERS, ROUNDS = 3, 12
LAUNCHES = 3 * LAYERS
ROWS = (1, 8, 32, 64, 128, 256)
PACKINGS = {
    "affine-4": Packing(64, 4, "affine"),
    "mxfp4": Packing(32, 4, "mxfp4"),
    "nvfp4": Packing(16, 4, "nvfp4"),
    "affine-8": Packing(64, 8, "affine"),
    "mxfp8": Packing(32, 8, "mxfp8"),
}


class Shape(NamedTuple):
    """Sizes of a mixture: of rows, of an expert's inner rows, and numbers of experts."""

    hidden: int
    inner: int
    experts: int
    top: int


SHAPES = {
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
    "gemma-4-26b-a4b": Shape(2816, 704, 128, 8),
    "qwen3.5-35b-a3b": Shape(2048, 512, 256, 8),
}
Arrays = Sequence[mx.array]


@dataclass(frozen=True)
class Product:
    """A product of rows with their experts' matrices.

    Attributes:
        gated: by both matrices of a gate, or by the last matrix.
        tile: most pairs of row and expert in a tile.
        gemm: the kernel.
    """

    shape: Shape
    packing: Packing
    rows: int
    gated: bool
    tile: int
    gemm: Gemm

    @property
    def pairs(self) -> int:
        return self.rows * self.shape.top

    @property
    def sizes(self) -> tuple[int, int]:
        """Columns and rows of a matrix."""
        sizes = self.shape.hidden, self.shape.inner
        return sizes if self.gated else sizes[::-1]

    @property
    def source(self) -> str:
        _, _, experts, top = self.shape
        if self.gated:
            return product_kernels.experts_first(
                self.gemm,
                experts,
                top,
                joined=None,
                activation="silu",
                offsets=False,
                tiles=max_tiles(self),
            )
        return product_kernels.experts_down(self.gemm, experts, tiles=max_tiles(self))

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.gemm.grid(-(-self.gemm.outputs // self.gemm.width), max_tiles(self))


def max_tiles(each: Product) -> int:
    return min(each.pairs, each.shape.experts + each.pairs // each.tile)


def product(shape: Shape, packing: Packing, rows: int, *, gated: bool) -> Product:
    """Return a product as graphs compute it."""
    tile = expert_tile(card(), rows * shape.top, shape.experts, packing)
    inputs, outputs = (shape.hidden, shape.inner) if gated else (shape.inner, shape.hidden)
    bits, group_size, mode = packing.bits, packing.group_size, packing.mode
    gemm: Gemm
    if tile <= most_skinny_pairs(bits):
        own = {"bits": bits, "mode": mode, "tile": tile}
        gemm = SkinnyGemm(inputs, outputs, group_size, rows, card(), gated, experts=True, **own)
    else:
        all_rows = tile * min(rows * shape.top, shape.experts + rows * shape.top // tile)
        cut = inputs, outputs, bits, group_size, all_rows, card(), gated, True
        gemm = WarpgroupGemm(*cut, mode, tile) if card().warpgroups else WideGemm(*cut, mode)
    return Product(shape, packing, rows, gated, tile=tile, gemm=gemm)


def matrices(shape: Shape, packing: Packing) -> list[list[Arrays]]:
    """Draw gate, up and last matrices of `LAYERS` layers."""
    sizes = [(shape.inner, shape.hidden)] * 2 + [(shape.hidden, shape.inner)]
    layers = []
    for _ in range(LAYERS):
        layers.append([])
        for outputs, inputs in sizes:
            whole = mx.random.normal((shape.experts, outputs, inputs)) * inputs**-0.5
            own = {"group_size": packing.group_size, "bits": packing.bits, "mode": packing.mode}
            layers[-1].append(mx.quantize(whole.astype(mx.bfloat16), **own))
            mx.eval(layers[-1][-1])
    return layers


def grouped(each: Product, seed: int) -> tuple[mx.array, mx.array, int]:
    """Draw each row's experts; return the pairs by expert, their tiles, and the number of experts
    that are used."""
    generator = np.random.default_rng([seed, each.rows])
    experts, top = each.shape.experts, each.shape.top
    chosen = np.argsort(generator.random((each.rows, experts)))[:, :top].reshape(-1)
    tiles, begin = list[tuple[int, int, int]](), 0
    used, counts = np.unique(chosen, return_counts=True)
    for expert, count in zip(used.tolist(), counts.tolist(), strict=True):
        for place in range(0, count, each.tile):
            tiles.append((expert, begin + place, min(each.tile, count - place)))
        begin += count
    tiles += [(0, 0, 0)] * (max_tiles(each) - len(tiles))
    order = np.argsort(chosen, kind="stable").astype(np.int32)
    return mx.array(order), mx.array(np.array(tiles, np.int32)), len(used)


def measured(each: Product, layers: Sequence[Sequence[Arrays]]) -> dict[str, Any]:
    """Time a product within a graph of them."""
    address = load_extension().pointer
    inputs, outputs = each.sizes
    x = mx.random.normal((each.rows if each.gated else each.pairs, inputs)).astype(mx.bfloat16)
    y = mx.zeros((each.pairs, outputs), mx.bfloat16)
    drawn = [grouped(each, n) for n in range(LAUNCHES)]
    mx.eval(x, y, [own[:2] for own in drawn])
    (function,) = compiler().functions([each.source])
    launches = []
    for n, (order, tiles, _) in enumerate(drawn):
        gate, up, down = layers[n % LAYERS]
        arrays = [*gate, *up] if each.gated else [*down]
        launches.append(
            Launch(
                function,
                each.grid,
                each.gemm.threads,
                shared=each.gemm.shared,
                arguments=tuple(map(address, [x, *arrays, order, tiles, y])),
                after=(n - 1,) if n else (),
            )
        )
    us = _microseconds(Graph(launches))
    used = sum(own[2] for own in drawn) / LAUNCHES
    read = used * (1 + each.gated) * sum(array[0].nbytes for array in layers[0][0])
    found = {"experts": round(used, 1), "us": round(us, 1), "GB/s": round(read / us / 1e3)}
    order, tiles, _ = drawn[-1]
    return found | {"error": round(_error(each, x, y, order, tiles, layers[-1]), 5)}


def _microseconds(graph: Graph) -> float:
    """Return the time of one of a graph's launches, the least of three rounds."""
    launched_us(graph, 3)
    return min(launched_us(graph, ROUNDS) for _ in range(3)) / LAUNCHES


def _error(
    each: Product,
    x: mx.array,
    y: mx.array,
    order: mx.array,
    tiles: mx.array,
    layer: Sequence[Arrays],
) -> float:
    """Return the error of the first and the last tile of the last launch."""
    packing, errors = each.packing, []
    filled = [own for own in np.array(tiles).tolist() if own[2]]
    for expert, first, count in (filled[0], filled[-1]):
        places = mx.arange(first, first + count)
        rows = x[order[places] // each.shape.top if each.gated else places].astype(mx.float32)
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
            for arrays in (layer[:2] if each.gated else [layer[2]] * 2)
        )
        expected = left * mx.sigmoid(left) * right if each.gated else right
        got = y[places if each.gated else order[places]].astype(mx.float32)
        errors.append((mx.linalg.norm(got - expected) / mx.linalg.norm(expected)).item())
    return max(map(float, errors))


def compile_all(sources: Sequence[str]) -> None:
    while not compiler().start(sources):
        time.sleep(0.1)


def main(out: Path, names: list[str]) -> None:
    shapes = {name: each for name, each in SHAPES.items() if name in names} or SHAPES
    packings = {name: each for name, each in PACKINGS.items() if name in names} or PACKINGS
    every = {
        (shape, packing): [
            product(shapes[shape], packings[packing], rows, gated=gated)
            for rows in ROWS
            for gated in (True, False)
        ]
        for shape in shapes
        for packing in packings
    }
    compile_all([each.source for products in every.values() for each in products])
    rows = []
    for (shape, packing), products in every.items():
        layers = matrices(shapes[shape], packings[packing])
        for each in products:
            facts = {"shape": shape, "packing": packing, "rows": each.rows, "gated": each.gated}
            facts["cut"] = f"{each.gemm.cut}, tile {each.tile}"
            rows.append(facts | measured(each, layers))
            print(*rows[-1].values(), flush=True)
        del layers
        mx.clear_cache()
    device = mx.device_info().get("device_name")
    out.write_text(json.dumps({"device": device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
