"""Times the kernels of a graphed step: `step_kernels.py FOLDER OUT [FORMAT...]`.

A step of 8 streams is taken after contexts of 128, 1,100 and 20,000 tokens. Graphs of its first
kernel, its first two, three and so on are launched again and again: what a graph takes longer than
the one before is the kernel's. So work that other kernels hide counts as nothing.
"""

from __future__ import annotations

import ctypes
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
from contexts import CONTEXTS, STREAMS, Recorded, streams

from quire.core.config import EngineConfig
from quire.core.kv_choice import parse_format
from quire.device.cuda.driver import Graph, Launch, Source, driver_call
from quire.device.gpu_kernels import kernel_text
from quire.engine.factory import open_engine
from quire.executor.graphs.executor import GraphExecutor
from quire.executor.graphs.recorder import Kernel

LAUNCHES, STEPS = 6, 20
_SOURCES = ("quire.executor.graphs", "quire.attention.paged", "quire.device.cuda")


def recorded_kernels(
    executor: GraphExecutor, format: str, rows: int = STREAMS
) -> tuple[list[Kernel], list[Launch], list[mx.array]]:
    """Return the kernels of the graph of `rows` rows, their launches for the pools of now, and the
    arrays that these need."""
    assert executor._graphs is not None, "steps run as graphs"
    cache = executor._graphs._cache
    for (stored, recorded), found in cache._recorded.items():
        if recorded == rows and stored.name == parse_format(format).name:
            graphs, kept = found.launches(cache._addresses(stored))
            if len(graphs) > 1:
                raise SystemExit("MLX computes parts of this step between several graphs")
            return found.recorder.kernels, graphs[0], kept
    raise SystemExit(f"steps in {format} are not recorded")


def named(source: Source) -> str:
    """Return the file whose text comes last in a kernel's source, which holds its body; what a
    library computes as it is printed."""
    if not isinstance(source, str):
        return str(source)
    places: dict[str, int] = {}
    for package in _SOURCES:
        for file in files(package).joinpath("sources").iterdir():
            if file.name.endswith(".cuh"):
                places[file.name.removesuffix(".cuh")] = source.find(
                    kernel_text(package, file.name)
                )
    last = max(places, key=lambda name: places[name])
    return last if places[last] >= 0 else "generated"


def microseconds(recorded: Recorded, launches: Sequence[Launch], kept: Sequence[mx.array]) -> float:
    """Time a graph of some launches on the inputs of the last step."""
    graph = Graph(launches, kept)
    found = recorded.milliseconds(graph.handle, LAUNCHES)
    assert found is not None, "the last step launched no graph"
    return found * 1e3


def parts_of(
    recorded: Recorded,
    kernels: Sequence[Kernel],
    launches: Sequence[Launch],
    kept: Sequence[mx.array],
    first: int,
) -> list[dict[str, Any]]:
    """Return each kernel of a layer, in order: its median microseconds among the `first` kernels,
    and alone, where those of all layers follow each other. Kernels that read lists of experts are
    not run alone: later kernels have written to the memory of the lists.
    """
    own, tiles = defaultdict[Source, list[float]](list), dict[Source, str]()
    before = 0.0
    for count in range(1, min(first, len(launches)) + 1):
        now, kernel = microseconds(recorded, launches[:count], kept), kernels[count - 1]
        own[kernel.source].append(now - before)
        before = now
        if isinstance(kernel.source, str) and "#define EXPERTS 1" in kernel.source:
            tiles[kernel.source] = tiles_of(kernel)
    rows = []
    for source, times in own.items():
        alike = [n for n, each in enumerate(kernels) if each.source == source]
        chain = [
            replace(launches[n], after=(place - 1,) if place else ())
            for place, n in enumerate(alike)
        ]
        row = {"kernel": named(source), "grid": kernels[alike[0]].grid, "count": len(alike)}
        row |= {"us": round(statistics.median(times), 1), "tiles": tiles.get(source, "")}
        if source not in tiles and "const int* chosen" not in str(source):
            row["alone"] = round(microseconds(recorded, chain, kept) / len(chain), 1)
        rows.append(row)
    return rows


def tiles_of(kernel: Kernel) -> str:
    """Return how many tiles, pairs and experts the products of a kernel that has just run had."""
    most = re.search(r"tiles_shape\[2\] = \{(\d+), 3\}", str(kernel.source))
    assert most is not None, "products of experts name the most tiles"
    found = (ctypes.c_int * (3 * int(most[1])))()
    source = ctypes.c_uint64(kernel.arguments[-2])
    driver_call("cuMemcpyDtoH_v2", found, source, ctypes.c_size_t(ctypes.sizeof(found)))
    tiles = [found[n : n + 3] for n in range(0, len(found), 3) if found[n + 2]]
    pairs, experts = sum(each[2] for each in tiles), len({each[0] for each in tiles})
    return f"{len(tiles)} tiles, {pairs} pairs, {experts} experts"


def profiled(
    recorded: Recorded,
    kernels: Sequence[Kernel],
    launches: Sequence[Launch],
    kept: Sequence[mx.array],
) -> list[dict[str, Any]]:
    """Return microseconds by source and grid of kernels, the greatest first.

    Args:
        kept: arrays that the launches need.
    """
    sums: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    names: dict[Source, str] = {}
    before = microseconds(recorded, launches[:1], kept)
    for count in range(2, len(launches) + 1):
        now = microseconds(recorded, launches[:count], kept)
        kernel = kernels[count - 1]
        if kernel.source not in names:
            names[kernel.source] = named(kernel.source)
        sums[names[kernel.source], kernel.grid].append(now - before)
        before = now
    rows = [
        {"kernel": name, "grid": grid, "count": len(own), "us": round(sum(own), 1)}
        | {"median": round(statistics.median(own), 2)}
        for (name, grid), own in sums.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def main(folder: str, out: Path, formats: list[str]) -> None:
    engine = open_engine(EngineConfig(folder, kv_memory=40 << 30))
    executor = engine._executor
    if not isinstance(executor, GraphExecutor):
        raise SystemExit("no step of this model is recorded here")
    recorded = Recorded(executor._graphs)
    found: list[dict[str, Any]] = []
    for format in formats or ["plain"]:
        for context in CONTEXTS:
            with streams(engine, format, context):
                for _ in range(STEPS):
                    engine.step()
                alone = recorded.milliseconds()
                kernels, launches, kept = recorded_kernels(executor, format)
                rows = profiled(recorded, kernels, launches, kept)
            total = round(sum(row["us"] for row in rows), 1)
            facts = {"format": format, "context": context, "graph, ms": alone, "us": total}
            found.append(facts | {"kernels": rows})
            print(facts)
            for row in rows[:16]:
                print("  ", row, flush=True)
            out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
