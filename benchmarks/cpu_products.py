"""Codes that one thread multiplies in a second, by number of rows: the CPU kernels alone.

    python benchmarks/cpu_products.py [--kernels avx2] [--columns 2880] [--depth 1024]

The best of some calls, of processor time: other work on the machine changes it little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from quire.device.cpu.kernels import load_kernels
from quire.device.weights import in_tiles

PACKINGS = ((4, 64), (4, 32), (8, 64))
ROWS = (1, 2, 4, 8, 16, 17, 24, 32, 64, 256)


def multiplied(
    ops: Any, x: mx.array, packed: Sequence[mx.array], calls: int, **packing: Any
) -> float:
    """Return products of a number and a code in a second."""
    best = float("inf")
    for _ in range(calls):
        started = time.process_time()
        mx.eval(ops.product(x, *packed, **packing))
        best = min(best, time.process_time() - started)
    columns = packed[0].shape[0]
    return x.size * columns / best


def main() -> None:
    """Print a table in 1e9 a second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--columns", type=int, default=2880)
    parser.add_argument("--depth", type=int, default=1024)
    asked = parser.parse_args()
    kernels = load_kernels(1, asked.kernels)
    mx.set_default_device(mx.cpu)
    print(
        f"| {kernels.instructions}, 1e9 a second | " + " | ".join(f"{n} rows" for n in ROWS) + " |"
    )
    print("| --- |" + " ---: |" * len(ROWS))
    for bits, group in PACKINGS:
        weight = mx.random.normal((asked.columns, asked.depth))
        packing = {"group_size": group, "bits": bits}
        packed = list(mx.quantize(weight, **packing))
        if tiled := kernels.ops.reads_tiles(bits, "affine"):
            packed = [in_tiles(each) for each in packed]
        mx.eval(packed)
        cells = []
        for rows in ROWS:
            x = mx.random.normal((rows, asked.depth))
            mx.eval(x)
            calls = 200 if rows <= 16 else 20
            rate = multiplied(kernels.ops, x, packed, calls, tiled=tiled, **packing)
            cells.append(f"{rate / 1e9:.0f}")
        print(f"| {bits} bits in groups of {group} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
