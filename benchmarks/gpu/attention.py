"""Times the attention kernels of recorded steps alone, without MLX around them: `attention.py OUT`.

Blocks hold random numbers or codes. Each figure is the median of five graphs of ten launches.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from quire.attention.paged import cuda, packed
from quire.device.cuda.compiled import compiler
from quire.device.cuda.driver import Graph, Launch
from quire.engine.decode import kernels
from quire.engine.decode.served import extension_for_graphs

BLOCK, COUNT = 64, 10
CODES = {"page-4": (4, 4, 64), "page-8": (8, 8, 128)}


def arrays_of(shape: cuda.Shape, blocks: int, codes: packed.Codes | None) -> list[mx.array]:
    """As a store has them, without tails."""
    heads, dim = blocks * shape.kv_heads, shape.key_dim
    if codes is None:
        return [_bytes((heads, BLOCK, dim), mx.bfloat16) for _ in range(2)]
    groups = dim // codes.value_group
    keys = _bytes((heads, dim, BLOCK * codes.key_bits // 32), mx.uint32)
    values = _bytes((heads, BLOCK, dim * codes.value_bits // 32), mx.uint32)
    scales = [mx.full((heads, dim, 1), n, mx.float16) for n in (0.1, -0.8)]
    of_values = [mx.full((heads, BLOCK, groups), n, mx.float16) for n in (0.1, -0.8)]
    return [keys, *scales, values, *of_values]


def _bytes(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.bfloat16:
        return mx.random.normal(shape, dtype=dtype)
    return mx.random.randint(-(2**31), 2**31 - 1, shape, dtype=mx.int32).view(dtype)


def measured(shape: cuda.Shape, name: str, rows: int, keys: int) -> dict[str, Any]:
    """One row of each of `rows` sequences with `keys` keys of their own."""
    codes = packed.Codes(*CODES[name]) if name in CODES else None
    each = -(-keys // BLOCK)
    arrays = arrays_of(shape, rows * each, codes)
    rng = np.random.default_rng(0)
    table = mx.array(rng.permutation(rows * each).astype(np.int32))
    low, high = 0, keys if codes is None else (keys - 1) // BLOCK * BLOCK
    tiles = mx.array([[row, 1, low, high, row * each, keys - 1] for row in range(rows)])
    splits, heads = shape.splits(rows), shape.heads
    q = _bytes((rows, heads, shape.key_dim), mx.bfloat16)
    found = mx.zeros((rows, heads, splits, shape.value_dim)), mx.zeros((rows, heads, splits, 2))
    numbers, parts = cuda.numbers(0.05, None), shape.kv_heads * (shape.group // shape.part)
    if codes is None:
        given = [q, *arrays, tiles, table, numbers, *found, mx.zeros_like(q)]
        source, shared = kernels.attend(shape), cuda.single_memory(shape)
        grid = rows, parts, splits
    else:
        tails = [_bytes((rows * shape.kv_heads, BLOCK, shape.key_dim), mx.bfloat16)] * 2
        own = [[row, 1, high, keys, row - high // BLOCK, row] for row in range(rows)]
        visible = mx.array([[0, keys - 1]] * rows)
        result = mx.zeros((rows, heads, 1, shape.value_dim)), mx.zeros((rows, heads, 1, 2))
        given = [q, *arrays, *tails, tiles, mx.array(own), table, mx.arange(rows), visible]
        given += [numbers, *found, *result]
        source, shared = kernels.attend_packed(shape, codes), packed.shared_memory(shape, codes)
        grid = rows, parts, splits + 1
    mx.eval(given)
    us = _microseconds(source, grid, shared, given)
    size = sum(array.nbytes for array in arrays)
    return {"format": name, "rows": rows, "keys": keys, "us": us, "TB/s": size / us / 1e6}


def _microseconds(
    source: str, grid: tuple[int, int, int], shared: int, given: list[mx.array]
) -> float:
    extension = extension_for_graphs()
    (function,) = compiler().functions([source])
    arguments = tuple(map(extension.pointer, given))
    launches = [
        Launch(function, grid, cuda.LANES, shared, arguments, (n - 1,) if n else ())
        for n in range(COUNT)
    ]
    graph, out = Graph(launches), mx.zeros((1, 1))
    mx.eval(out)
    times = []
    for _ in range(6):
        begun = time.perf_counter()
        mx.eval(extension.replay(graph.handle, [], [], out, 1))
        mx.synchronize()
        times.append((time.perf_counter() - begun) / COUNT * 1e6)
    return round(statistics.median(times[1:]), 1)


def main(out: Path) -> None:
    found = []
    for dim, kv_heads, group in ((128, 8, 4), (256, 8, 2), (512, 2, 8)):
        shape = cuda.Shape(mx.bfloat16, dim, dim, kv_heads, group, BLOCK, False, False)
        for rows, keys in ((8, 20_000), (1, 20_000), (8, 1024), (8, 190), (1, 190)):
            for name in ("plain", *CODES):
                row = measured(shape, name, rows, keys)
                found.append({"heads": f"{shape.heads}/{kv_heads} x {dim}"} | row)
                print(found[-1], flush=True)
    out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
