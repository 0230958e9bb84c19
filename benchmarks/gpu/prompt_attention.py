"""Times attention of prompts over plain blocks by warpgroups: `prompt_attention.py OUT`.

Rows of one sequence after a context. A graph of 8 launches, one behind the other: microseconds of
one, TFLOPS over the keys that rows see, and the error relative to MLX's attention; with whole tiles
and with keys of tiles shared by thread blocks.
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from wide_products import launched_us

from quire.attention.paged.cuda import Shape
from quire.attention.paged.tiles import score_numbers
from quire.attention.paged.tiling import Tiling
from quire.attention.paged.warpgroups import PromptTiles, prompt_tiles
from quire.device.cuda import driver
from quire.device.cuda.compiled import compiler
from quire.device.cuda.driver import Graph, Launch
from quire.device.cuda.extension import load_extension
from quire.executor.graphs.attention import attention_kernels

HEADS = ((128, 8, 4), (256, 8, 2), (512, 2, 8), (64, 8, 8))
"""head_dim, KV heads, query heads for each of them."""
BLOCK = 64
CASES = ((2048, 0), (2048, 2048), (2048, 18_000), (600, 8_000), (544, 18_000), (137, 18_000))
"""Rows, and the context before them."""
LAUNCHES, ROUNDS = 8, 7


def inputs(
    tiles: PromptTiles, rows: int, context: int, tiling: Tiling
) -> tuple[list[mx.array], mx.array]:
    """Return what the kernel is launched with, and the result of MLX's attention."""
    shape = tiles.shape
    keys, heads = context + rows, shape.heads
    blocks = -(-keys // BLOCK)
    stored = blocks, shape.kv_heads, BLOCK, shape.key_dim
    q = mx.random.normal((rows, heads, shape.key_dim)).astype(mx.bfloat16)
    k, v = (mx.random.normal(stored).astype(mx.bfloat16) for _ in range(2))
    order = np.random.default_rng(0).permutation(blocks)
    first = np.arange(0, rows, tiles.rows)
    whole = np.zeros((len(first), 6), np.int32)
    whole[:, 0], whole[:, 1] = first, np.minimum(tiles.rows, rows - first)
    whole[:, 3] = context + first + whole[:, 1]
    cut = tiling.shared(np.ascontiguousarray(whole[::-1]))
    visible = np.stack([np.zeros(rows), context + np.arange(rows)], axis=1).astype(np.int32)
    scale = shape.key_dim**-0.5
    given = [q, k, v, mx.array(cut), mx.array(order.astype(np.int32)), mx.array(visible)]
    given += [score_numbers(scale, None), mx.zeros_like(q)]
    count = len(cut) * tiling.heads
    given += [mx.zeros((count * tiles.piece,), mx.uint8), mx.zeros((count,), mx.int32)]
    given += tiles.maps
    plain = [
        x[mx.array(order)].swapaxes(0, 1).reshape(1, shape.kv_heads, -1, shape.key_dim)[:, :, :keys]
        for x in (k, v)
    ]
    expected = mx.fast.scaled_dot_product_attention(
        q.swapaxes(0, 1)[None], *plain, scale=scale, mask="causal"
    )
    mx.eval(given, expected)
    return given, expected[0].swapaxes(0, 1)


def measured(tiles: PromptTiles, rows: int, context: int, at_once: int) -> dict[str, Any]:
    """Time attention after a context."""
    shape = tiles.shape
    tiling = Tiling(tiles.rows, shape.blocks, at_once)
    given, expected = inputs(tiles, rows, context, tiling)
    (function,) = compiler().functions([attention_kernels.attend_prompts(tiles)])
    grid = len(given[3]), tiling.heads, 1
    arguments = tuple(map(load_extension().pointer, given))
    launches = [
        Launch(function, grid, tiles.threads, tiles.shared, arguments, (n - 1,) if n else ())
        for n in range(LAUNCHES)
    ]
    graph = Graph(launches, given)
    us = statistics.median(launched_us(graph, 1) / LAUNCHES for _ in range(ROUNDS))
    result = given[7].astype(mx.float32)
    error = mx.linalg.norm(result - expected.astype(mx.float32)) / mx.linalg.norm(
        expected.astype(mx.float32)
    )
    flops = 4 * shape.heads * shape.key_dim * rows * (context + (rows + 1) / 2)
    return {"us": round(us, 1), "TFLOPS": round(flops / us / 1e6), "error": round(error.item(), 5)}


def main(out: Path) -> None:
    found = list[dict[str, Any]]()
    for dim, kv_heads, group in HEADS:
        shape = Shape(mx.bfloat16, dim, dim, kv_heads, group, BLOCK, False, False)
        tiles = prompt_tiles(shape, driver.card(), value_in_key=False)
        if tiles is None:
            continue
        for (rows, context), shared in product(CASES, (False, True)):
            facts = {"head_dim": dim, "heads": (kv_heads * group, kv_heads)}
            facts |= {"rows": rows, "context": context, "keys": "shared" if shared else "whole"}
            at_once = driver.card().multiprocessors if shared else 0
            found.append(facts | measured(tiles, rows, context, at_once))
            print(*found[-1].values(), flush=True)
    out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
