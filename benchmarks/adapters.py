"""A batch of rows with an adapter each beside the same rows without, in turns in one process.

    python benchmarks/adapters.py MODEL [--rows 8] [--rank 8] [--steps 60] [--turn 4] [--threads N]
                                  [--out FILE]

Adapters of random factors change every matrix that can have one. Engines share the weights and
generate the same number of tokens, some steps each in turn. Of processor time, other work on the
machine changes less than of the clock. On a GPU a third engine has adapters and no CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.device.cpu.cores import usable_cores
from quire.device.device import current_device, open_device
from quire.device.dtypes import DTYPES
from quire.engine.assembly import assemble
from quire.engine.engine import Engine
from quire.executor.executor import Executor
from quire.executor.factory import SharedGraphs, open_executor
from quire.executor.segments.runner import open_segments
from quire.models.base import named_parameters
from quire.models.weights.loader import LoadedModel, open_model
from quire.models.weights.low_rank import LowRank
from quire.program.trace import multiplied

PROMPT, WARM = 16, 8
"""Tokens of a prompt, and steps before the first turn."""
SETTINGS = {"MLX_ENABLE_TF32": "0", "MLX_USE_CUDA_GRAPHS": "0"}
"""What `quire serve` sets for its engine. MLX reads it when it is imported."""
CLOCKS = {"all threads": time.process_time, "wall": time.perf_counter}


def factors(loaded: LoadedModel, rank: int, seed: int) -> LowRank:
    """Return small random factors for every matrix of a layer."""
    parameters, made, dtype = named_parameters(loaded.model), {}, DTYPES[loaded.dtype]
    key = mx.random.key(seed)
    for path in sorted(multiplied(loaded.model)):
        weight = parameters[path]
        if ".layers." not in path or weight.ndim != 2:
            continue
        module = path.removesuffix(".weight")
        packed = parameters.get(f"{module}.scales")
        outputs = weight.shape[0]
        inputs = weight.shape[1] if packed is None else packed.shape[1] * 64
        key, one, other = mx.random.split(key, 3)
        made[module] = (
            (mx.random.normal((inputs, rank), key=one) * 1e-3).astype(dtype),
            (mx.random.normal((rank, outputs), key=other) * 1e-3).astype(dtype),
        )
    return LowRank(made, f"random {seed}")


class NoGraphs(SharedGraphs):
    """No CUDA graphs: steps go layer by layer."""

    def open(self, *_: object, **__: object) -> None: ...


def with_adapters(
    adapters: Mapping[str, LowRank], opens: Callable[..., Executor], *given: Any, **more: Any
) -> Executor:
    """Open an executor that has adapters in memory."""
    executor = opens(*given, **more)
    for name, each in adapters.items():
        executor.adapters.add(name, each)
    return executor


def engines(loaded: LoadedModel, rows: int, rank: int, steps: int) -> Mapping[str, Engine]:
    """Return engines that generate, with an adapter for each row and without."""
    config = EngineConfig("", kv_memory=1 << 28, prefix_cache=False, speculate="off")
    opens = partial(open_executor, segments=open_segments(loaded.model))
    adapters = {f"adapter {number}": factors(loaded, rank, number) for number in range(rows)}
    kinds = {"without": opens, "adapters": partial(with_adapters, adapters, opens)}
    if current_device().kernel_language == "cuda":
        layers = partial(open_executor, graphs=NoGraphs())
        kinds["adapters, layer by layer"] = partial(with_adapters, adapters, layers)
    found = {kind: assemble(loaded, config, open_executor=each) for kind, each in kinds.items()}
    for kind, engine in found.items():
        for number, name in enumerate(adapters):
            prompt = tuple(3 + (i * 7 + number) % 1000 for i in range(PROMPT))
            request = Request(
                f"{number}", prompt, SamplingParams(temperature=0), max_tokens=steps + 4 * WARM
            )
            engine.add(replace(request, adapter="" if kind == "without" else name))
        for _ in range(WARM):
            engine.step()
    return found


def measure(found: Mapping[str, Engine], steps: int, turn: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of a step, by engine and clock."""
    spent = {name: {clock: list[float]() for clock in CLOCKS} for name in found}
    for _ in range(steps // turn):
        for name, engine in found.items():
            begun = {clock: read() for clock, read in CLOCKS.items()}
            for _ in range(turn):
                for output in engine.step():
                    assert output.error is None, output.error
            mx.synchronize()
            for clock, read in CLOCKS.items():
                spent[name][clock].append((read() - begun[clock]) / turn * 1e3)
    return {
        name: {clock: median(each) for clock, each in own.items()} for name, own in spent.items()
    }


def main() -> None:
    """Print the milliseconds of a step and their ratio as JSON."""
    if not SETTINGS.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**SETTINGS, **os.environ})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turn", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=usable_cores().count)
    given = parser.parse_args()
    open_device("auto", threads=given.threads)
    loaded = open_model(given.model)
    opened = engines(loaded, given.rows, given.rank, given.steps)
    found = measure(opened, given.steps, given.turn)
    plain = found["without"]
    report = {
        "rows": given.rows,
        "rank": given.rank,
        "ms a step": found,
        "tokens/s": {kind: round(given.rows / each["wall"] * 1e3) for kind, each in found.items()},
        "speed with adapters": {
            kind: {clock: round(plain[clock] / each[clock], 3) for clock in CLOCKS}
            for kind, each in found.items()
            if kind != "without"
        },
    }
    print(json.dumps(report))
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
