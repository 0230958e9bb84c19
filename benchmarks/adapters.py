"""A batch of rows with an adapter each beside the same rows without, in turns in one process.

    python benchmarks/adapters.py MODEL [--rows 8] [--rank 8] [--steps 60] [--threads N]

Adapters of random factors change every matrix that can have one. Two engines share the weights and
generate the same number of tokens, four steps each in turn. Of processor time, other work on the
machine changes less than of the clock.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import median

import mlx.core as mx

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.device.cpu.cores import usable_cores
from quire.device.device import open_device
from quire.engine.assembly import assemble
from quire.engine.engine import Engine
from quire.executor.executor import Executor
from quire.executor.factory import open_executor
from quire.executor.segments.runner import open_segments
from quire.models.base import named_parameters
from quire.models.weights.loader import LoadedModel, open_model
from quire.models.weights.low_rank import LowRank
from quire.program.trace import multiplied

PROMPT, TURN, WARM = 16, 4, 8
"""Tokens of a prompt, steps of a turn, and steps before the first one."""
CLOCKS = {"all threads": time.process_time, "wall": time.perf_counter}


def factors(loaded: LoadedModel, rank: int, seed: int) -> LowRank:
    """Return small random factors for every matrix of a layer."""
    parameters, made = named_parameters(loaded.model), {}
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
            mx.random.normal((inputs, rank), key=one) * 1e-3,
            mx.random.normal((rank, outputs), key=other) * 1e-3,
        )
    return LowRank(made, f"random {seed}")


def engines(loaded: LoadedModel, rows: int, rank: int, steps: int) -> Mapping[str, Engine]:
    """Return engines that generate, with an adapter for each row and without."""
    config = EngineConfig("", kv_memory=1 << 28, prefix_cache=False)
    opens = partial(open_executor, segments=open_segments(loaded.model))
    adapters = {f"adapter {number}": factors(loaded, rank, number) for number in range(rows)}

    def adapted(*given: LoadedModel | EngineConfig, **more: object) -> Executor:
        executor = opens(*given, **more)
        for name, each in adapters.items():
            executor.adapters.add(name, each)
        return executor

    found = {
        "without": assemble(loaded, config, open_executor=opens),
        "adapters": assemble(loaded, config, open_executor=adapted),
    }
    for kind, engine in found.items():
        for number, name in enumerate(adapters):
            prompt = tuple(3 + (i * 7 + number) % 1000 for i in range(PROMPT))
            request = Request(
                f"{number}", prompt, SamplingParams(temperature=0), max_tokens=steps + 4 * WARM
            )
            engine.add(replace(request, adapter=name if kind == "adapters" else ""))
        for _ in range(WARM):
            engine.step()
    return found


def measure(found: Mapping[str, Engine], steps: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of a step, by engine and clock."""
    spent = {name: {clock: list[float]() for clock in CLOCKS} for name in found}
    for _ in range(steps // TURN):
        for name, engine in found.items():
            begun = {clock: read() for clock, read in CLOCKS.items()}
            for _ in range(TURN):
                for output in engine.step():
                    assert output.error is None, output.error
            mx.synchronize()
            for clock, read in CLOCKS.items():
                spent[name][clock].append((read() - begun[clock]) / TURN * 1e3)
    return {
        name: {clock: median(each) for clock, each in own.items()} for name, own in spent.items()
    }


def main() -> None:
    """Print the milliseconds of a step and their ratio as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=usable_cores().count)
    given = parser.parse_args()
    open_device("auto", threads=given.threads)
    loaded = open_model(given.model)
    found = measure(engines(loaded, given.rows, given.rank, given.steps), given.steps)
    ratios = {c: round(found["without"][c] / found["adapters"][c], 3) for c in CLOCKS}
    print(json.dumps({"ms a step": found, "speed with adapters": ratios}))


if __name__ == "__main__":
    main()
