"""Times exchanges of rows between two cards: `exchange.py OUT [ROWS]`.

Two processes join by NCCL, and hold exchanges through each other's memory against the expected
rows. Microseconds by the number of rows of 8,192 bfloat16:

* of an exchange, of which a graph has 64, beside MLX's `all_sum`;
* of a link: a product in 4 bits, the ranks' sum, the residual and the norm. A graph has 40: without
  a sum, with a kernel of its own for it, and with products that send and norms that sum. The last
  two must give the same bits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from quire.device.cards import card_of

if TYPE_CHECKING:  # MLX looks for cards when it is imported
    import mlx.core as mx

    from quire.device.cuda.inboxes import Inboxes
    from quire.device.ranks import Part
    from quire.program.values import Program

RANKS, TIMES, LINKS, MATRICES, WIDTH = 2, 64, 40, 8, 8192
ROWS = "1,2,4,8,16,32,128,512"
_FEW = 16
"""Most rows for which the links of a step are timed."""
_PORTS = (32_500, 32_501)


def measure(rank: int, counts: list[int]) -> dict[str, Any]:
    """Join the other process, and time exchanges."""
    os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")
    import mlx.core as mx

    from quire.device.ranks import Part, join
    from quire.executor.graphs.ranks.exchange_check import verified_inboxes

    part = Part(rank, RANKS)
    join(part, [[f"127.0.0.1:{port}"] for port in _PORTS])
    inboxes = verified_inboxes(part)
    found: dict[str, Any] = {"device": str(mx.device_info().get("device_name"))}
    mx.random.seed(rank)
    packed = [mx.quantize(mx.random.normal((WIDTH, WIDTH)) * WIDTH**-0.5) for _ in range(MATRICES)]
    matrices = [[each.astype(mx.bfloat16) for each in arrays[1:]] for arrays in packed]
    programs = {
        summed: chain(
            part,
            [(arrays[0], *rest) for arrays, rest in zip(packed, matrices, strict=True)],
            summed=summed,
        )
        for summed in (False, True)
    }
    for count in counts:
        own = found[f"{count} rows"] = exchanged(inboxes, count)
        if count <= _FEW:
            own |= linked(inboxes, programs, count)
    return found


def exchanged(inboxes: Inboxes, count: int) -> dict[str, Any]:
    """Return the microseconds of an exchange alone, and of MLX's."""
    import mlx.core as mx

    from quire.device.cuda.compiled import compiler
    from quire.device.cuda.driver import Graph, Launch
    from quire.device.cuda.extension import load_extension
    from quire.device.gpu_kernels import in_device_memory
    from quire.device.ranks import collectives
    from quire.executor.graphs.ranks.exchange import Exchange

    extension = load_extension()
    x = mx.ones((count, WIDTH), mx.bfloat16)
    y, rows, out = mx.zeros_like(x), in_device_memory(mx.array([count])), mx.zeros((1, 1))
    mx.eval(x, y, rows, out)
    exchange = Exchange(inboxes.part, mx.bfloat16, WIDTH, count, gathered=False)
    (function,) = compiler().functions([exchange.text])
    arguments = tuple(map(extension.pointer, (rows, inboxes.table, x, y)))
    graph = Graph(
        [
            Launch(function, exchange.grid, exchange.threads, 0, arguments, (n - 1,) if n else ())
            for n in range(TIMES)
        ]
    )

    def summed() -> mx.array:
        own = x
        for _ in range(TIMES):
            own = collectives().summed(own) * 0.5
        return own

    return {
        "exchange, us": timed(lambda: extension.replay(graph.handle, [], [], out, 1), TIMES),
        "all_sum and a product, us": timed(summed, TIMES),
    }


def chain(part: Part, matrices: list[tuple[mx.array, ...]], *, summed: bool) -> Program:
    """Return a program of `LINKS` products, sums of ranks if `summed`, residuals and norms."""
    import mlx.core as mx

    from quire.device.weights import PackedWeight, Packing
    from quire.program.passes import prepared
    from quire.program.values import Form, Node, Program, Value, Weight

    mx.eval(matrices)
    nodes, (x, h), last = list[Node](), (0, 1), 1
    norm = Weight("norm", mx.ones((WIDTH,), mx.bfloat16))
    for link in range(LINKS):
        weight = PackedWeight(*matrices[link % MATRICES], packing=Packing(64, 4, "affine"))
        y = last + 1
        own = {"weight": Weight("weight", weight)}
        nodes.append(Node("packed_linear", (x,), (y,), ("x",), attributes=own))
        if summed:
            nodes.append(Node("summed", (y,), (y + 1,), ("x",), attributes={"part": part}))
            y += 1
        nodes.append(Node("Add", (h, y), (y + 1,)))
        own = {"weight": norm, "eps": 1e-5}
        nodes.append(Node("rms_norm", (y + 1,), (y + 2,), ("x",), attributes=own))
        h, x, last = y + 1, y + 2, y + 2
    value = Value((Form(0, (("T", 1),)), WIDTH), mx.bfloat16)
    values = dict.fromkeys(range(last + 1), value)
    return prepared(Program(("T",), {"x": 0, "h": 1}, {}, values, tuple(nodes), (x,)))


@contextmanager
def as_before() -> Iterator[None]:
    """Let a kernel of its own exchange rows."""
    from quire.executor.graphs.ranks import rank_sums

    with patch.object(rank_sums, "fits", lambda rows, row: False):
        yield


@contextmanager
def joined() -> Iterator[None]:
    """Let products send up to `_FEW` rows, one row as well."""
    from quire.executor.graphs.ranks import rank_sums

    with patch.object(rank_sums, "_ROWS", range(1, _FEW + 1)):
        yield


def linked(inboxes: Inboxes, programs: dict[bool, Program], count: int) -> dict[str, Any]:
    """Return the microseconds of each way from one product to the next."""
    import mlx.core as mx

    from quire.device.ranks import collectives

    ways: list[tuple[str, bool, Any]] = [
        ("link without a sum, us", False, as_before),
        ("link with an exchange, us", True, as_before),
        ("link whose product sends, us", True, joined),
    ]
    found, results = dict[str, Any](), list[mx.array]()
    for name, summed, way in ways:
        with way():
            run, kernels = recorded(inboxes, programs[summed], count)
        found[name], found[f"{name[:-4]}: kernels"] = timed(run, LINKS), kernels / LINKS
        if summed:
            mx.eval(result := run() + 0)
            results += [result, *mx.split(collectives().gathered(result), RANKS)]
    found["same bits"] = all(bool(mx.array_equal(results[0], each)) for each in results[1:])
    return found


def recorded(inboxes: Inboxes, program: Program, count: int) -> tuple[Callable[[], mx.array], int]:
    """Return what runs a program on the same rows each time, and its number of kernels."""
    import mlx.core as mx

    from quire.device.cuda.compiled import compiler
    from quire.device.cuda.driver import Graph, card
    from quire.device.cuda.extension import load_extension
    from quire.device.gpu_kernels import in_device_memory
    from quire.executor.graphs.places import Place
    from quire.executor.graphs.recorder import Buffer, Recorder, launches
    from quire.executor.graphs.recording import Recording

    extension = load_extension()
    rank = inboxes.part.rank
    x, h = (
        mx.random.normal((count, WIDTH), key=mx.random.key(seed)).astype(mx.bfloat16)
        for seed in (1 + rank, 0)
    )
    rows, out = in_device_memory(mx.array([count])), mx.zeros((count, WIDTH), mx.bfloat16)
    mx.eval(x, h, rows, out)
    inputs = cast(Any, SimpleNamespace(rows=extension.pointer(rows)))
    recorder = Recorder(count, extension.pointer, inputs, card(), inboxes=inboxes)
    recording = Recording(recorder, {}, cast(Any, None), states={})
    buffers = [Buffer(extension.pointer(each), each.nbytes, each) for each in (x, h, out)]
    given = {name: Place(each.address, each) for name, each in zip("xh", buffers, strict=False)}
    recording.record(program, given, buffers[2:])
    functions = compiler().functions([each.source for each in recorder.kernels])
    kept = [rows, x, h, *recorder.kept, *recorder.allocated]
    graph = Graph(launches(recorder.kernels, functions), kept)
    return lambda: extension.replay(graph.handle, [], [], out, count), len(recorder.kernels)


def timed(run: Callable[[], mx.array], times: int) -> float:
    """Return the microseconds of one of `times` in a run: the best of ten runs."""
    import mlx.core as mx

    took = []
    for _ in range(11):
        mx.synchronize()
        begun = time.perf_counter()
        mx.eval(run())
        mx.synchronize()
        took.append(time.perf_counter() - begun)
    return round(min(took[1:]) / times * 1e6, 2)


def main(out: Path, counts: str) -> None:
    """Run both processes; write what the first one measured."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(out.with_suffix(f".{rank}")), counts, str(rank)],
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
    if len(sys.argv) > 3:
        measured = measure(int(sys.argv[3]), [int(each) for each in sys.argv[2].split(",")])
        Path(sys.argv[1]).write_text(json.dumps(measured, indent=1))
    else:
        main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ROWS)
