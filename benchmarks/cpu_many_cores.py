"""Quire's engine beside llama.cpp by numbers of threads, for a machine with many cores.

    python benchmarks/cpu_many_cores.py OUT.json [--llama avx512/llama-batched-bench] [--limit 200]

Contenders take turns, a process each, until the time is up: whole rounds over both shapes, so that
later rounds repeat earlier ones. What has been measured is in the file at any time, with seconds of
a step by part. llama.cpp takes part by `--llama`, as in `cpu.py`; the package `gguf` is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from cpu import Contender, make_models, own_file
from cpu_gguf import FILES
from cpu_models import SHAPES
from cpu_work import Work

from quire.device.cpu.cores import usable_cores

STREAMS = (1, 8, 32)


def contenders(models: Path, shape: str, asked: argparse.Namespace) -> Iterator[Contender]:
    """Yield who takes part, most wanted first."""
    python = sys.executable
    for threads in asked.threads:
        own = str(models / own_file(shape))
        work = Work(own, asked.prompt, STREAMS, asked.tokens, threads)
        yield Contender(f"quire, {threads} threads", python, "cpu_quire.py", work)
        for program in asked.llama:
            packed = replace(work, model=str(models / f"{shape}-Q4_0.gguf"), llama=str(program))
            name = f"llama.cpp {program.parent.name}, {threads} threads"
            yield Contender(name, python, "cpu_llama.py", packed)
    work = replace(work, threads=asked.threads[0])
    for kernels in asked.kernels:
        forced = replace(work, kernels=kernels)
        yield Contender(f"quire, {kernels}", python, "cpu_quire.py", forced)
    if asked.all:
        eager = replace(work, segments=False)
        yield Contender("quire, without segments", python, "cpu_quire.py", eager)


def table(title: str, runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return the medians of tokens/s by the clock, and the rates of processor time."""
    columns = ["prompt", *map(str, STREAMS)]
    lines = [f"### {title}", "", "| | computes with | " + " | ".join(columns) + " |"]
    lines.append("| --- | --- |" + " ---: |" * len(columns))
    for name, rounds in runs.items():
        cells = [f"{median(each['wall'][what] for each in rounds):,.0f}" for what in columns]
        lines.append(f"| {name} | {rounds[0]['computes']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure until the time is up, write the file after each turn, print tables."""
    cores = usable_cores()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", type=Path, default=Path("/tmp/quire-cpu-models"))
    parser.add_argument("--shapes", nargs="*", choices=[*SHAPES, *FILES], default=list(SHAPES))
    parser.add_argument("--threads", type=int, nargs="*", default=[cores.count, cores.count // 2])
    parser.add_argument("--kernels", nargs="*", default=[], help="instruction sets beside the best")
    parser.add_argument("--llama", type=Path, nargs="*", default=[], help="llama-batched-bench")
    parser.add_argument("--all", action="store_true", help="also with segments off")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--limit", type=float, default=200, help="seconds")
    asked = parser.parse_args()
    begun = time.monotonic()
    results: dict[str, Any] = {"cores": cores.count, "why": cores.why, "failed": {}, "shapes": {}}
    for shape in asked.shapes:
        make_models(asked.models, shape)
    print(f"{cores}; models after {time.monotonic() - begun:.0f} s", file=sys.stderr)
    for number in range(9):
        for shape in asked.shapes:
            runs = results["shapes"].setdefault(shape, {})
            for each in contenders(asked.models, shape, asked):
                left = asked.limit - (time.monotonic() - begun)
                if left < 5 or each.name in results["failed"]:
                    continue
                try:
                    rates = each.round(min(left, 30))
                except SystemExit as error:
                    results["failed"][each.name] = str(error)
                    print(error, file=sys.stderr)
                    continue
                runs.setdefault(each.name, []).append(vars(rates))
                wall = {what: round(rate) for what, rate in rates.wall.items()}
                print(f"{number} {shape} {each.name} {wall} {rates.parts}", file=sys.stderr)
                asked.out.write_text(json.dumps(results, indent=1) + "\n")
    for shape, runs in results["shapes"].items():
        print(table(shape, runs), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
