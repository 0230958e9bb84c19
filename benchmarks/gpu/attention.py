"""Times attention in recorded steps alone, without MLX around it: `attention.py OUT [FORMAT...]`.

Formats as in `--kv-format`: plain, page-4, uniform-4 and turbo-4 unless said otherwise. A figure is
of the kernel that attends and of the one that joins what its thread blocks found, of 8 sequences
or one: the median of five runs of graphs of ten such pairs, over other blocks each while they fit
into 6 GB. Blocks hold random codes. With `splits` among the arguments it is taken for each number
of thread blocks that may share a row's keys, and for as many that a multiprocessor is to hold.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from quire.attention.paged import cuda, packed
from quire.attention.paged.portable_kernels import Codes
from quire.attention.paged.tiles import score_numbers
from quire.cache.formats.base import LayerShape, PackedStore
from quire.cache.formats.registry import make_store
from quire.core.kv_choice import parse_format
from quire.core.kv_format import KVFormat
from quire.device.cuda.compiled import compiler
from quire.device.cuda.driver import Graph, Launch, card
from quire.device.cuda.extension import load_extension
from quire.device.gpu_kernels import in_device_memory
from quire.device.weights import random_codes
from quire.executor.graphs.attention import attention_kernels, token_kernels

BLOCK, COUNT = 64, 10
HEADS = ((512, 2, 8), (256, 8, 2), (128, 8, 4))
"""head_dim, KV heads, query heads for each of them."""
KEYS = ((8, 0, 20_000), (1, 0, 20_000), (8, 100, 1_124), (8, 0, 190), (1, 0, 190), (32, 0, 320))
"""Sequences, first key, key past the last."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
HELD = (None, 3, 4)
"""Thread blocks that a multiprocessor is to hold; None leaves it to registers and shared memory."""
FORMATS = ("plain", "page-4", "uniform-4", "turbo-4")
MOST_BYTES, WARM_S = 6 << 30, 0.008


@dataclass(frozen=True)
class Pair:
    """Two kernels and what they are launched with; the second waits for the first."""

    sources: tuple[str, str]
    grids: tuple[tuple[int, int, int], tuple[int, int, int]]
    shared: int
    given: tuple[list[mx.array], list[mx.array]]


def store_of(shape: cuda.Shape, format: KVFormat, blocks: int, rows: int) -> PackedStore | None:
    """Return random codes, and tails where the format has them; None for plain blocks."""
    dims = shape.kv_heads, shape.key_dim, shape.value_dim
    store = make_store(LayerShape(*dims, BLOCK, shape.dtype), format).packed
    if store is None:
        return None
    store.resize(blocks, ())
    for arrays in store.block_arrays:
        for number, each in enumerate(arrays):
            arrays[number] = random_like(each.shape, each.dtype)
            mx.eval(arrays[number])
    if store.has_tail:
        store.resize_tails(rows, ())
    return store


def on_device(numbers: Any) -> mx.array:
    """Return int32 numbers in the memory of a step's inputs."""
    return in_device_memory(mx.array(np.array(numbers, np.int32)))


def random_like(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.uint32:
        return random_codes(shape)
    return mx.random.normal(shape, dtype=dtype)


def pair(
    shape: cuda.Shape, format: KVFormat, rows: int, low: int, high: int, splits: int
) -> tuple[Pair, int]:
    """Return one row of each of `rows` sequences that see the keys `[low, high)`; and bytes
    read.
    """
    each, heads = -(-high // BLOCK), shape.heads
    table = on_device(np.random.default_rng(0).permutation(rows * each))
    store = store_of(shape, format, rows * each, rows)
    q = random_like((rows, heads, shape.key_dim), mx.bfloat16)
    found = mx.zeros((rows, heads, splits, shape.value_dim)), mx.zeros((rows, heads, splits, 2))
    numbers, result, count = score_numbers(0.05, None), mx.zeros_like(q), on_device([rows])
    parts, joins = shape.blocks, (rows * heads, 1, 1)
    coded = high if format.scheme != "page" else (high - 1) // BLOCK * BLOCK
    tiles = on_device([[row, 1, low, coded, row * each, high - 1] for row in range(rows)])
    if store is None:
        kept = (rows * each * shape.kv_heads, BLOCK, shape.key_dim)
        arrays = [random_like(kept, mx.bfloat16) for _ in range(2)]
        first = [q, *arrays, tiles, table, numbers, *found, result]
        second = [count, *found, tiles, result]
        sources = (
            attention_kernels.attend(shape, card()),
            attention_kernels.combine(shape, splits, card()),
        )
        shared, grid = cuda.single_memory(shape), (rows, parts, splits)
    elif format.scheme == "page":
        arrays = store.arrays()[:-2]
        codes = Codes.of(store.packed.coded())
        own = on_device([[row, 1, coded, high, row - coded // BLOCK, row] for row in range(rows)])
        of_own = mx.zeros((rows, heads, 1, shape.value_dim)), mx.zeros((rows, heads, 1, 2))
        visible = on_device([[low, high - 1]] * rows)
        first = [q, *store.arrays(), tiles, own, table, on_device(range(rows)), visible, numbers]
        first += [*found, *of_own]
        second = [count, *found, *of_own, in_device_memory(packed.signs(shape.value_dim)), result]
        sources = (
            attention_kernels.attend_packed(shape, codes),
            attention_kernels.join(shape, splits, turned=True),
        )
        shared, grid = packed.shared_memory(shape, codes), (rows, parts, splits + 1)
    else:
        layout = store.coded()
        arrays = [*layout.keys, *layout.values]
        kernel = token_kernels.attend(shape, Codes.of(layout))
        turn = layout.layout.value_rotation
        signs = mx.zeros((1,)) if turn is None else turn.map * turn.scale
        first = [q, *arrays, tiles, table, numbers, *found]
        second = [count, *found, signs, result]
        combine = token_kernels.combine(shape, splits, shape.value_dim, turned=turn is not None)
        sources, shared, grid = (kernel.text, combine), kernel.shared, (rows, parts, splits)
    mx.eval(first, second)
    read = sum(array.nbytes for array in arrays) * (high - low) // high
    return Pair(sources, (grid, joins), shared, (first, second)), read


def held(source: str, blocks: int | None) -> str:
    """Return a kernel of which a multiprocessor is to hold so many thread blocks; None as it is."""
    if blocks is None:
        return source
    return re.sub(r"__launch_bounds__\((\d+)[^)]*\)", rf"__launch_bounds__(\1, {blocks})", source)


def microseconds(pairs: list[Pair], blocks: int | None) -> float:
    extension = load_extension()
    functions = compiler().functions([held(pairs[0].sources[0], blocks), pairs[0].sources[1]])
    launches: list[Launch] = []
    for number in range(COUNT):
        own = pairs[number % len(pairs)]
        for function, grid, shared, given in zip(
            functions, own.grids, (own.shared, 0), own.given, strict=True
        ):
            before = (len(launches) - 1,) if launches else ()
            arguments = tuple(map(extension.pointer, given))
            launches.append(Launch(function, grid, cuda.LANES, shared, arguments, before))
    graph, out = Graph(launches), mx.zeros((1, 1))
    mx.eval(out)

    def seconds(times: int) -> float:
        mx.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            mx.async_eval(extension.replay(graph.handle, [], [], out, 1))
        mx.synchronize()
        return (time.perf_counter() - started) / times

    seconds(3)
    times = max(3, int(WARM_S / seconds(10)))  # a card that idles takes a while to be at its clock
    seconds(2 * times)
    return round(statistics.median(seconds(times) for _ in range(5)) / COUNT * 1e6, 1)


@dataclass(frozen=True)
class Job:
    """A measured kernel and its shape; `held` as in `held`."""

    shape: cuda.Shape
    format: str
    rows: int
    low: int
    high: int
    splits: int
    held: int | None

    def sources(self) -> list[str]:
        """Return the sources of both kernels."""
        first, second = pair(self.shape, parse_format(self.format), 1, 0, 1, self.splits)[0].sources
        return [held(first, self.held), second]

    def measured(self) -> dict[str, Any]:
        sizes = self.rows, self.low, self.high, self.splits
        first, read = pair(self.shape, parse_format(self.format), *sizes)
        room = max(1, min(COUNT, MOST_BYTES // max(1, read)))
        more = [pair(self.shape, parse_format(self.format), *sizes)[0] for _ in range(room - 1)]
        us = microseconds([first, *more], self.held)
        shape = f"{self.shape.heads}/{self.shape.kv_heads} x {self.shape.key_dim}"
        row = {"heads": shape, "format": self.format, "rows": self.rows}
        row |= {"keys": self.high - self.low, "splits": self.splits, "held": self.held}
        return row | {"us": us, "TB/s": round(read / us / 1e6, 2)}


def jobs(formats: list[str], *, sweep: bool) -> list[Job]:
    found = []
    for dim, kv_heads, group in HEADS:
        shape = cuda.Shape(mx.bfloat16, dim, dim, kv_heads, group, BLOCK, False, False)
        for format in formats:
            for rows, low, high in KEYS:
                usual = shape.splits(rows, card())
                tried = [n for n in SPLITS if usual <= 2 * n <= 6 * usual] if sweep else [usual]
                many = sweep and rows > 1 and high > 1000
                for splits in tried:
                    for blocks in HELD if many else HELD[:1]:
                        found.append(Job(shape, format, rows, low, high, splits, blocks))
    return found


def main(out: Path, names: list[str]) -> None:
    formats = [name for name in names if name != "splits"]
    asked = jobs(formats or list(FORMATS), sweep="splits" in names)
    compiler().functions([text for job in asked for text in job.sources()])
    rows = []
    for job in asked:
        rows.append(job.measured())
        print(json.dumps(rows[-1]), flush=True)
        out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
