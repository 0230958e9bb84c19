"""Times exchanges of rows between two cards: `exchange.py OUT`.

Two processes join by NCCL, hold exchanges through each other's memory against the expected rows,
and time graphs of 64 of them, beside MLX's `all_sum`. Writes microseconds of one exchange, by rows
of 8,192 bfloat16.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from quire.device.cards import card_of

RANKS, TIMES, WIDTH = 2, 64, 8192
ROWS = (1, 8, 32, 128, 512)
_PORTS = (32_500, 32_501)


def measure(rank: int) -> dict[str, Any]:
    """Join the other process, and time exchanges."""
    os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")
    import mlx.core as mx

    from quire.device.cuda.compiled import compiler
    from quire.device.cuda.driver import Graph, Launch
    from quire.device.cuda.extension import load_extension
    from quire.device.ranks import Part, collectives, join
    from quire.executor.graphs.exchange import Exchange
    from quire.executor.graphs.exchange_check import verified_inboxes

    part = Part(rank, RANKS)
    join(part, [[f"127.0.0.1:{port}"] for port in _PORTS])
    inboxes, extension = verified_inboxes(part), load_extension()
    found: dict[str, Any] = {"device": str(mx.device_info().get("device_name"))}
    for count in ROWS:
        x = mx.ones((count, WIDTH), mx.bfloat16)
        y, rows, out = mx.zeros_like(x), mx.array([count]), mx.zeros((1, 1))
        mx.eval(x, y, rows, out)
        exchange = Exchange(part, mx.bfloat16, WIDTH, count, gathered=False)
        (function,) = compiler().functions([exchange.text])
        arguments = tuple(map(extension.pointer, (rows, inboxes.table, x, y)))
        launches = [
            Launch(function, exchange.grid, exchange.threads, 0, arguments, (n - 1,) if n else ())
            for n in range(TIMES)
        ]
        graph = Graph(launches)

        def replayed(graph: Graph = graph, out: mx.array = out) -> mx.array:
            return extension.replay(graph.handle, [], [], out, 1)

        def summed(x: mx.array = x) -> mx.array:
            for _ in range(TIMES):
                x = collectives().summed(x) * 0.5
            return x

        found[f"{count} rows"] = {
            "graph, us": timed(replayed),
            "all_sum and a product, us": timed(summed),
        }
    return found


def timed(run: Any) -> float:
    """Return the microseconds of one exchange of a run of `TIMES`: the best of five runs."""
    import mlx.core as mx

    took = []
    for _ in range(6):
        mx.synchronize()
        begun = time.perf_counter()
        mx.eval(run())
        mx.synchronize()
        took.append(time.perf_counter() - begun)
    return round(min(took[1:]) / TIMES * 1e6, 2)


def main(out: Path) -> None:
    """Run both processes; write what the first one measured."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(out.with_suffix(f".{rank}")), str(rank)],
            env=os.environ | card_of(rank),
        )
        for rank in range(RANKS)
    ]
    for each in processes:
        try:
            each.wait(timeout=100)
        except subprocess.TimeoutExpired:
            each.kill()
    out.write_text(out.with_suffix(".0").read_text())


if __name__ == "__main__":
    if len(sys.argv) > 2:
        Path(sys.argv[1]).write_text(json.dumps(measure(int(sys.argv[2])), indent=1))
    else:
        main(Path(sys.argv[1]))
