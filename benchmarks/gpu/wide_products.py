"""Products of 64 to 512 rows by each cut of `wide_gemm.cuh`: `wide_products.py OUT`.

A graph of 20 products, one behind the other, of four matrices in turns: microseconds a product, and
TFLOPS. The matrices are those of Llama 3.1 8B, in 4 bits. `WideGemm` chooses by these times.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from quire.device.cuda import driver, wide_gemm
from quire.device.cuda.compiled import compiler
from quire.device.cuda.driver import Graph, Launch
from quire.device.cuda.extension import load_extension
from quire.device.cuda.wide_gemm import WideGemm
from quire.executor.graphs import kernels

MATRICES = [(4096, 14_336, True), (14_336, 4096, False), (4096, 6144, False), (4096, 4096, False)]
"""Columns, rows, and whether it is a gate with its values."""
ROWS = (64, 128, 256, 512)
LAUNCHES, ROUNDS = 20, 10


def microseconds(gemm: WideGemm, rows: int) -> float:
    """Time one product within a graph of them."""
    address, matrices = load_extension().pointer, 2 if gemm.gated else 1
    weights = []
    for _ in range(4):
        codes = mx.random.randint(0, 2**31 - 1, (gemm.outputs, gemm.inputs // 8)).astype(mx.uint32)
        scales = mx.full((gemm.outputs, gemm.inputs // gemm.group_size), 0.01, dtype=mx.bfloat16)
        weights.append([codes, scales, 0 * scales] * matrices)
    x = mx.random.normal((rows, gemm.inputs)).astype(mx.bfloat16)
    y, count = mx.zeros((rows, gemm.outputs), mx.bfloat16), mx.array(np.array([rows] * 4, np.int32))
    mx.eval(x, y, count, weights)
    if gemm.gated:
        source = kernels.gated(gemm, "silu")
    else:
        source = kernels.linear(gemm, (gemm.outputs,), offsets=False)
    (function,) = compiler().functions([source])
    grid = -(-gemm.outputs // gemm.width), gemm.blocks, 1
    launches = []
    for number in range(LAUNCHES):
        arrays = [count, x, *weights[number % 4], y]
        after = (number - 1,) if number else ()
        arguments = tuple(map(address, arrays))
        launches.append(Launch(function, grid, gemm.threads, gemm.shared, arguments, after))
    graph, cuda = Graph(launches), driver._driver()

    def launch(times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            cuda.cuGraphLaunch(ctypes.c_void_p(graph.handle), None)
        cuda.cuCtxSynchronize()
        return (time.perf_counter() - begun) * 1e6 / times / LAUNCHES

    launch(3)
    return launch(ROUNDS)


def main(out: Path) -> None:
    found: list[dict[str, Any]] = []
    for inputs, outputs, gated in MATRICES:
        for rows in ROWS:
            gemm = WideGemm(inputs, outputs, 4, 64, rows, driver.card(), gated)
            chosen = gemm.cuts()[0]
            for cut in gemm.cuts():
                wide_gemm._chosen = lambda gemm, cut=cut: cut  # type: ignore[assignment]
                us = microseconds(gemm, rows)
                flops = 2 * rows * inputs * outputs * (2 if gated else 1)
                found.append(
                    {"matrix": (inputs, outputs), "gated": gated, "rows": rows, "cut": cut}
                    | {
                        "us": round(us, 1),
                        "TFLOPS": round(flops / us / 1e6),
                        "chosen": cut == chosen,
                    }
                )
                print(found[-1], flush=True)
            out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
