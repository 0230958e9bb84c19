"""Two source trees of Quire over HTTP, in alternating rounds on one machine.

    python benchmarks/pairs.py OLD/bin/python NEW/bin/python [--model FOLDER] [--rounds 3]

Each interpreter has its tree installed. The load is the `quire bench` of the environment that runs
this. The last columns are the ratios of the rounds' pairs, and their median.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LEVELS = (1, 8, 32)
READY = re.compile(r"at (http://\S+)/v1")


def measured(python: str, model: list[str], folder: Path) -> dict[int, float]:
    """Return tokens a second of one server, by the number of streams."""
    log, out = folder / "log", folder / "bench.json"
    command = [python, "-m", "quire", "serve", *model, "--port", "0", "--log-level", "warning"]
    with log.open("w") as said:
        server = subprocess.Popen(command, stdout=said, stderr=said, cwd=folder)
    try:
        while (ready := READY.search(log.read_text())) is None:
            if server.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        load = [sys.executable, "-m", "quire", "bench", "--url", ready[1], "--json", str(out)]
        load += ["--concurrency", ",".join(map(str, LEVELS)), "--requests", "64"]
        load += ["--max-tokens", "96", "--ignore-eos"]
        subprocess.run(load, check=True, stdout=subprocess.DEVNULL)
    finally:
        server.terminate()
        server.wait()
    levels = json.loads(out.read_text())["levels"]
    return {level["concurrency"]: level["tokens_per_s"] for level in levels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--model", type=Path, help="the embedded one if left out")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = [str(args.model.resolve())] if args.model else []
    rounds: list[dict[str, dict[int, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            order = (args.old, args.new) if number % 2 == 0 else (args.new, args.old)
            rounds.append({python: measured(python, model, Path(folder)) for python in order})
    for level in LEVELS:
        pairs = [(each[args.old][level], each[args.new][level]) for each in rounds]
        ratios = [new / old for old, new in pairs]
        shown = ", ".join(f"{old:,.0f} -> {new:,.0f}" for old, new in pairs)
        print(f"{level} streams: {shown} tokens/s; {statistics.median(ratios):.2f} times")


if __name__ == "__main__":
    main()
