"""A CPU's steps by segments beside those by the model's own code, in turns in one process.

    python benchmarks/segments.py MODEL [--threads N] [--streams 1 8 32] [--steps 120]

Two engines share the weights and generate the same tokens, four steps each in turn. Other work on
the machine slows both alike; of processor time it changes less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from functools import partial
from statistics import median

import mlx.core as mx

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.device.cpu.cores import usable_cores
from quire.device.device import open_device
from quire.engine.assembly import assemble
from quire.engine.engine import Engine
from quire.executor.factory import open_executor
from quire.executor.segments.runner import open_segments
from quire.models.weights.loader import LoadedModel, open_model

PROMPT, TURN, WARM = 16, 4, 6
"""Tokens of a prompt, steps of a turn, and steps before the first one."""
CLOCKS = {
    "all threads": time.process_time,
    "Python's thread": time.thread_time,
    "wall": time.perf_counter,
}


def engines(loaded: LoadedModel, streams: int, steps: int) -> Mapping[str, Engine]:
    """Return engines that generate, by name."""
    config = EngineConfig("", kv_memory=1 << 28, prefix_cache=False)
    segments = open_segments(loaded.model)
    found = {
        "model": assemble(loaded, config),
        "segments": assemble(
            loaded, config, open_executor=partial(open_executor, segments=segments)
        ),
    }
    for engine in found.values():
        for number in range(streams):
            prompt = tuple(3 + (i * 7 + number) % 1000 for i in range(PROMPT))
            greedy = SamplingParams(temperature=0)
            engine.add(Request(f"{number}", prompt, greedy, max_tokens=steps + 4 * WARM))
        for _ in range(WARM):
            engine.step()
    return found


def measure(found: Mapping[str, Engine], steps: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of a step, by engine and clock."""
    spent = {name: {clock: list[float]() for clock in CLOCKS} for name in found}
    for _ in range(steps // TURN):
        for name, engine in found.items():
            started = {clock: read() for clock, read in CLOCKS.items()}
            for _ in range(TURN):
                engine.step()
            mx.synchronize()
            for clock, read in CLOCKS.items():
                spent[name][clock].append((read() - started[clock]) / TURN * 1e3)
    return {
        name: {clock: median(each) for clock, each in own.items()} for name, own in spent.items()
    }


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=usable_cores().count)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    kernels = open_device("auto", threads=args.threads).kernels
    if kernels is None:
        raise SystemExit("segments are made of the compiled kernels, and there are none")
    loaded = open_model(args.model)
    print(f"{kernels.instructions}, {kernels.threads} threads, ms a step\n")
    print("| streams | | " + " | ".join(CLOCKS) + " |")
    print("| --- | --- |" + " ---: |" * len(CLOCKS))
    for streams in args.streams:
        found = measure(engines(loaded, streams, args.steps), args.steps)
        for name, own in found.items():
            cells = [f"{own[clock]:.2f}" for clock in CLOCKS]
            print(f"| {streams} | {name} | {' | '.join(cells)} |", flush=True)
        model, segments = found["model"], found["segments"]
        ratios = [f"{model[clock] / segments[clock]:.2f}" for clock in CLOCKS]
        print(f"| | model / segments | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
