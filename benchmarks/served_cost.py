"""What a served token costs each process: `served_cost.py MODEL [TREE ...] [--rounds 3]`.

Each tree's engine alone and its server answer the same prompts in alternating rounds. Printed
are medians of tokens/s and, for a token and each process (the engine's, the server's, the client
here): microseconds on a core, microseconds that threads waited for one, and how often they left it.
`bound` is the tokens/s at which no core would ever be idle; the client needs its share, which
`client_alone.py` measures. Gaps are those between a stream's events. With `--spread` also the
engine alone with prompts that begin one after the other, as a server's do, and with `--piped` the
engine in its process without HTTP. With `--burst 256` also so many requests at once: milliseconds
to the median and the last first token. Trees are checkouts; this one if none is named.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import psutil
from alone import Work
from peers import WARM_UP, make_work, requests_of
from servers import Serving, free_port, own_server

from quire.cli.bench import Load, calibrate, run_async, run_level
from quire.cli.load import Target, Timings, closed_loop
from quire.device.cpu.cores import usable_cores

_HERE = Path(__file__).resolve().parent
_LIMIT_S = 120.0
Row = dict[str, float]
"""Figures of one contender in one round, by name."""


def environment(tree: Path) -> dict[str, str]:
    """Return the environment of a contender: no hub, a tree's sources."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tree / "src")}


def serving(tree: Path, model: Path, sequences: int) -> Serving:
    """Return a context of a tree's server and its process."""
    port = free_port()
    options = ["--port", str(port), "--log-level", "warning", "--max-sequences", str(sequences)]
    command = [sys.executable, "-m", "quire", "serve", str(model), *options]
    return own_server(command, environment(tree), port)


class Times(NamedTuple):
    """Sums over a process's threads.

    Attributes:
        used: seconds on a core.
        waited: seconds ready to run without a core.
        switches: how often a thread left its core.
    """

    used: float
    waited: float
    switches: int

    @classmethod
    def of(cls, process: psutil.Process) -> Times:
        """Read the counters of the threads that run now (Linux)."""
        counts = [
            [int(count) for count in (task / "schedstat").read_text().split()]
            for task in Path(f"/proc/{process.pid}/task").iterdir()
        ]
        used, waited, switches = map(sum, zip(*counts, strict=True))
        return cls(used / 1e9, waited / 1e9, switches)


class Spent:
    """Processor time since this was made, of a server's processes and this one."""

    def __init__(self, server: psutil.Process) -> None:
        (engine,) = (each for each in server.children() if "engine" in " ".join(each.cmdline()))
        self._processes = {"engine": engine, "server": server, "client": psutil.Process()}
        self._before = self._now()

    def _now(self) -> dict[str, Times]:
        return {name: Times.of(process) for name, process in self._processes.items()}

    def since(self) -> dict[str, Times]:
        """Return the times of each process."""
        now, before = self._now(), self._before
        return {
            name: Times(*(new - old for new, old in zip(now[name], before[name], strict=True)))
            for name in now
        }


def served(tree: Path, model: Path, args: argparse.Namespace) -> Row:
    """Measure one server."""
    row: Row = {}
    with serving(tree, model, max(64, args.burst, *args.streams)) as (target, process):
        load = Load(model.name, max_tokens=args.max_tokens)

        async def measure() -> None:
            words = await calibrate(target, load, args.prompt_tokens, _LIMIT_S)
            most = max(args.streams)
            sized = Load(model.name, prompt_words=words, max_tokens=args.max_tokens)
            await run_level(target, sized, most, 2 * most, first=WARM_UP, timeout_s=_LIMIT_S)
            for at, streams in enumerate(args.streams):
                spent, requests = Spent(process), requests_of(streams, args)
                level = await run_level(
                    target, sized, streams, requests, first=at * 10_000, timeout_s=_LIMIT_S
                )
                if level.failed:
                    raise SystemExit(level.errors[0][0])
                row[f"{streams}: tokens/s"] = level.tokens_per_s
                times, tokens = spent.since(), level.completion_tokens
                client_s = level.client_cpu * level.wall_s  # before it decodes what it kept
                times["client"] = times["client"]._replace(used=client_s)
                for name, each in times.items():
                    row[f"{streams}: {name}, us a token"] = each.used / tokens * 1e6
                    row[f"{streams}: {name}, us waiting a token"] = each.waited / tokens * 1e6
                    row[f"{streams}: {name}, switches a token"] = each.switches / tokens
                used_s = sum(each.used for each in times.values())
                row[f"{streams}: bound, tokens/s"] = usable_cores().count * tokens / used_s
                row[f"{streams}: events a token"] = level.events / level.completion_tokens
                for name, spans in (("first token", level.ttft_ms), ("gap", level.itl_ms)):
                    if spans is not None:
                        row[f"{streams}: median {name}, ms"] = spans.median
                        row[f"{streams}: 95th percentile {name}, ms"] = spans.p95
            if args.burst:
                await _bursts(target, sized, args.burst, row, process)

        run_async(measure())
    return row


async def _bursts(
    target: Target, load: Load, burst: int, row: Row, process: psutil.Process
) -> None:
    """Send so many requests at once, twice; record the second."""
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(2):
        bodies = [load.body(10**7 + number * burst + each) for each in range(burst)]
        spent = Spent(process)
        exchanges = await closed_loop(target, load.route, bodies, burst, _LIMIT_S)
        times = spent.since()
        if number:
            answers = [each.timings() for each in exchanges]
            _burst_figures(answers, burst, times, found)
    row |= {f"burst of {burst}: {name}": statistics.mean(each) for name, each in found.items()}


def _burst_figures(
    answers: list[Timings], burst: int, times: dict[str, Times], found: dict[str, list[float]]
) -> None:
    started = min(answer.started for answer in answers)
    firsts = [(answer.text_times[0] - started) * 1e3 for answer in answers]
    found["median first token, ms"].append(statistics.median(firsts))
    found["last first token, ms"].append(max(firsts))
    took_s = max(answer.ended for answer in answers) - started
    found["tokens/s"].append(sum(answer.tokens for answer in answers) / took_s)
    for name, each in times.items():
        found[f"{name}, us a request"].append(each.used / burst * 1e6)


def alone(tree: Path, work: Work, *options: str, script: str = "engine_alone.py") -> Row:
    """Measure a tree's engine without HTTP, in a process of its own.

    Args:
        options: those of the script.
        script: the program that reads the work and prints the rates.
    """
    done = subprocess.run(
        [sys.executable, str(_HERE / script), *options],
        input=json.dumps(asdict(work)),
        capture_output=True,
        text=True,
        env=environment(tree),
        check=True,
    )
    rates = json.loads(done.stdout.strip().splitlines()[-1])
    return {f"{streams}: tokens/s": rate for streams, rate in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("trees", type=Path, nargs="*", default=[_HERE.parent])
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burst", type=int, default=0)
    parser.add_argument("--spread", action="store_true")
    parser.add_argument("--piped", action="store_true")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--requests-a-stream", type=int, default=8)
    parser.add_argument("--min-requests", type=int, default=8)
    args = parser.parse_args()
    args.streams = [int(each) for each in args.streams.split(",")]
    model = args.model.resolve()
    trees = [tree.resolve() for tree in args.trees]
    work = make_work(model, args)
    rows: dict[str, list[Row]] = defaultdict(list)
    for number in range(args.rounds):
        for tree in trees if number % 2 == 0 else reversed(trees):
            rows[f"engine of {tree} alone"].append(alone(tree, work))
            if args.spread:
                rows[f"engine of {tree} alone, prompts spread"].append(alone(tree, work, "spread"))
            if args.piped:
                piped = alone(tree, work, script="engine_piped.py")
                rows[f"engine of {tree} in its process"].append(piped)
            rows[str(tree)].append(served(tree, model, args))
        print(f"After {number + 1} rounds: " + ", ".join(rows))
        for name in rows[str(trees[0])][0]:
            print(f"{name}: " + ", ".join(_median(each, name) for each in rows.values()))
        sys.stdout.flush()


def _median(rows: list[Row], name: str) -> str:
    """Return the median of a figure; empty where the engine alone has none."""
    values = [row[name] for row in rows if name in row]
    return f"{statistics.median(values):.4g}" if values else "-"


if __name__ == "__main__":
    main()
