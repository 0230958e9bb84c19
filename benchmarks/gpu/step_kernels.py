"""Where a recorded step's time goes, kernel by kernel: `step_kernels.py FOLDER OUT [FORMAT...]`.

A step of 8 streams is taken after contexts of 128, 1,100 and 20,000 tokens. Graphs of its first
kernel, its first two, three and so on are launched again and again: what a graph takes longer than
the one before is the kernel's. So work that other kernels hide counts as nothing.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from contexts import CONTEXTS, STREAMS, Recorded, streams

from quire.core.config import EngineConfig
from quire.device.cuda.driver import Graph, Launch
from quire.device.gpu_kernels import kernel_text
from quire.engine.factory import open_engine
from quire.executor.graphs import recorder
from quire.executor.graphs import runner as graphs
from quire.executor.graphs.executor import GraphExecutor

LAUNCHES, STEPS = 6, 20
_SOURCES = ("quire.executor.graphs", "quire.attention.paged", "quire.device.cuda")


class Noted:
    """Stands before `recorder.launches` and remembers the kernels of each graph by its size."""

    def __init__(self) -> None:
        self.graphs: dict[int, tuple[list[recorder.Kernel], list[Launch]]] = {}
        """By the rows that the graph serves; the last one that was recorded."""

    def __call__(
        self, recorded: Sequence[recorder.Kernel], functions: Sequence[int]
    ) -> list[Launch]:
        found = recorder.launches(recorded, functions)
        rows = recorded[0].grid[0]  # the first kernel embeds a row in each thread block
        self.graphs[rows] = list(recorded), found
        return found


def named(source: str) -> str:
    """The file that holds a kernel's body: of those in its source, the one that comes last."""
    places: dict[str, int] = {}
    for package in _SOURCES:
        for file in files(package).joinpath("sources").iterdir():
            if file.name.endswith(".cuh"):
                places[file.name.removesuffix(".cuh")] = source.find(
                    kernel_text(package, file.name)
                )
    return max(places, key=lambda name: places[name])


def microseconds(recorded: Recorded, launches: Sequence[Launch]) -> float:
    """Of a graph of these kernels, on the inputs of the last step."""
    graph = Graph(launches)
    found = recorded.milliseconds(graph.handle, LAUNCHES)
    assert found is not None, "the last step launched no graph"
    return found * 1e3


def profiled(
    recorded: Recorded, kernels: Sequence[recorder.Kernel], launches: Sequence[Launch]
) -> list[dict[str, Any]]:
    """Microseconds by kernel, those of one source and grid together; the greatest first."""
    sums: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    names: dict[str, str] = {}
    before = microseconds(recorded, launches[:1])
    for count in range(2, len(launches) + 1):
        now = microseconds(recorded, launches[:count])
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
    noted = Noted()
    graphs.launches = noted  # type: ignore[attr-defined]
    engine = open_engine(EngineConfig(folder, kv_memory=40 << 30))
    executor = engine._executor
    if not isinstance(executor, GraphExecutor):
        raise SystemExit("no step of this model is recorded here")
    recorded = Recorded(executor.graphs)
    found: list[dict[str, Any]] = []
    for format in formats or ["plain"]:
        noted.graphs.clear()
        for context in CONTEXTS:
            with streams(engine, format, context):
                for _ in range(STEPS):
                    engine.step()
                if STREAMS not in noted.graphs:
                    raise SystemExit(f"steps in {format} are not recorded")
                alone = recorded.milliseconds()
                kernels, launches = noted.graphs[STREAMS]
                rows = profiled(recorded, kernels, launches)
            total = round(sum(row["us"] for row in rows), 1)
            facts = {"format": format, "context": context, "graph, ms": alone, "us": total}
            found.append(facts | {"kernels": rows})
            print(facts)
            for row in rows[:16]:
                print("  ", row, flush=True)
            out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
