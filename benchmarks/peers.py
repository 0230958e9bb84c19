"""Quire beside its peers: the same model, the same load, the same machine, round by round.

    python benchmarks/peers.py --peers-python PEERS/bin/python --model tiny [--rounds 3]

`tiny` is the random model of `make_tiny_model.py`, so small that the server is what is measured;
`demo` is the embedded one without its hearing (`make_demo_model.py`); anything else is a folder. In
each round every contender is started, warmed up, loaded at each number of streams, and stopped, so
that a slow minute of the machine hits all of them. Medians over the rounds go to `results/`, and to
the table in results/runs.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from alone import Work
from named_models import model_folder
from report import update_readme
from servers import SERVERS, Server, StartError, child_environment, running, version

from quire.cli.bench import PROBES, Load, calibrate, run_async, run_level, words_of
from quire.cli.bench_levels import Level
from quire.cli.load import LoadError, Target
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

HERE = Path(__file__).parent
ALONE = {
    "quire engine alone": ("engine_alone.py", False),
    "the same, without prefix cache and drafts": ("engine_alone.py bare", False),
    "mlx-lm BatchGenerator alone": ("batch_generator.py", True),
}
TIMEOUT_S = 300.0
WARM_UP = 10**6
"""Number of the first warm-up request; no level has it."""
PROBE_S = 40.0  # some servers are healthy without a model, and then never answer

Round = dict[str, Any]
"""One contender in one round: either `error`, or `levels` by number of streams."""


async def load_server(target: Target, load: Load, args: argparse.Namespace) -> list[Level]:
    """Warms a server up, then measures each number of streams.

    Raises:
        LoadError: the warm-up failed.
    """
    words = await calibrate(target, load, args.prompt_tokens, PROBE_S)
    load = replace(load, prompt_words=words)
    warm = await run_level(target, load, max(args.streams), max(args.streams), first=WARM_UP,
                           timeout_s=TIMEOUT_S)  # fmt: skip
    if warm.failed:
        raise LoadError(warm.errors[0][0])
    levels = []
    for number, streams in enumerate(args.streams):
        levels.append(
            await run_level(target, load, streams, requests_of(streams, args),
                            first=number * 10_000, timeout_s=TIMEOUT_S)
        )  # fmt: skip
    return levels


def requests_of(streams: int, args: argparse.Namespace) -> int:
    """Return the number of requests: some seconds' worth at one stream, several turns at many."""
    asked: int = args.requests_a_stream * streams
    return max(int(args.min_requests), asked)


def measure_server(server: Server, model: Path, args: argparse.Namespace) -> Round:
    """Measure one contender over HTTP."""
    load = Load(model=str(model), max_tokens=args.max_tokens)
    if server.package == "quire":
        load = replace(load, model=args.quire_name or model.name)
    try:
        with running(server, str(model), args.peers_python) as (target, ready_s):
            levels = run_async(load_server(target, load, args))
    except StartError as error:
        return {"error": str(error)}
    rows = {str(level.concurrency): asdict(level) for level in levels}
    return {"ready_s": round(ready_s, 2), "levels": rows}


def measure_alone(command: str, peer: bool, work: Work, args: argparse.Namespace) -> Round:
    """Measure one engine without HTTP, in a process of its own."""
    python = args.peers_python if peer else sys.executable
    script, *more = command.split()
    done = subprocess.run(
        [python, str(HERE / script), *more],
        input=json.dumps(asdict(work)),
        capture_output=True,
        text=True,
        env=child_environment(),
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        return {"error": "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])}
    rates = json.loads(done.stdout.strip().splitlines()[-1])
    return {"levels": {streams: {"tokens_per_s": rate} for streams, rate in rates.items()}}


def make_work(model: Path, args: argparse.Namespace) -> Work:
    """Return the prompts that servers get, as the ids that Quire's server makes of them."""
    tokenizer = Tokenizer.open(model)
    template = ChatTemplate.open(model, tokenizer.special_tokens)
    eos = json.loads((model / "generation_config.json").read_text())["eos_token_id"]

    def ids(load: Load, number: int) -> tuple[int, ...]:
        text = template.render(json.loads(load.body(number))["messages"])
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    few, many = (len(ids(Load("", prompt_words=words), -words)) for words in PROBES)
    load = Load("", prompt_words=words_of(args.prompt_tokens, few, many))

    def prompts(first: int, count: int) -> tuple[tuple[int, ...], ...]:
        return tuple(ids(load, first + number) for number in range(count))

    levels = tuple(
        (streams, prompts(10_000 * at, requests_of(streams, args)))
        for at, streams in enumerate(args.streams)
    )
    warm_up = prompts(WARM_UP, max(args.streams))
    stops = tuple(eos if isinstance(eos, list) else [eos])
    return Work(str(model), warm_up, levels, args.max_tokens, stops)


def summarise(rounds: list[Round]) -> dict[str, Any]:
    """Return medians over the rounds that went well, and the errors of those that did not."""
    good = [one for one in rounds if "error" not in one]
    errors = [one["error"] for one in rounds if "error" in one]
    levels: dict[str, Any] = {}
    for streams in good[0]["levels"] if good else ():
        rows = [one["levels"][streams] for one in good]
        rates = [row["tokens_per_s"] for row in rows]
        level = {"tokens_per_s": median(rates), "lowest": min(rates), "highest": max(rates)}
        for name in ("ttft_ms", "itl_ms"):
            spreads = [row[name] for row in rows if row.get(name)]
            if spreads:
                level[name] = {
                    part: median(spread[part] for spread in spreads)
                    for part in ("median", "p95", "max")
                }
        level["failed"] = sum(row.get("failed", 0) for row in rows)
        levels[streams] = level
    return {"rounds": len(good), "errors": errors, "levels": levels}


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Return the machine and the versions of this run."""
    versions = {s.name: version(args.peers_python, s.package) for s in SERVERS if s.peer}
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "mlx": {
            "quire": version(sys.executable, "mlx"),
            "peers": version(args.peers_python, "mlx"),
        },
        "versions": versions,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def run(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Run all rounds."""
    work = make_work(model, args)
    names = [server.name for server in SERVERS] + list(ALONE)
    chosen = [name for name in names if not args.only or name in args.only]
    servers = {server.name: server for server in SERVERS}
    rounds: dict[str, list[Round]] = {name: [] for name in chosen}
    for number in range(args.rounds):
        # Each round starts one contender later, so that nobody always runs first.
        for name in chosen[number % len(chosen) :] + chosen[: number % len(chosen)]:
            if name in servers:
                one = measure_server(servers[name], model, args)
            else:
                one = measure_alone(*ALONE[name], work, args)
            rounds[name].append(one)
            rates = {s: row["tokens_per_s"] for s, row in one.get("levels", {}).items()}
            print(f"round {number + 1}, {name}: {one.get('error') or rates}", flush=True)
    return {
        "model": args.model,
        "command": shlex.join(["python", "benchmarks/peers.py", *args.shown]),
        "machine": machine(args),
        "load": {
            "prompt_tokens": args.prompt_tokens,
            "max_tokens": args.max_tokens,
            "requests": {str(s): requests_of(s, args) for s in args.streams},
        },
        "contenders": {name: summarise(of) for name, of in rounds.items()},
        "rounds": rounds,
    }


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--peers-python", default=sys.executable, help="python of the peers' environment")
    add("--model", default="tiny", help="tiny, demo, or a folder")
    add("--quire-name", help="model name that quire serves (default: the folder's name)")
    add("--streams", default="1,2,3,4,8,16,32")
    add("--rounds", type=int, default=3)
    add("--prompt-tokens", type=int, default=64)
    add("--max-tokens", type=int, default=64)
    add("--requests-a-stream", type=int, default=3)
    add("--min-requests", type=int, default=8)
    add("--only", action="append", help="a contender's name; may be given again")
    add("--out", type=Path, help="default: results/peers-MODEL.json")
    args = parser.parse_args()
    args.streams = [int(part) for part in args.streams.split(",")]
    at = sys.argv[1:]
    args.shown = ["PEERS/bin/python" if part == args.peers_python else part for part in at]
    args.out = args.out or HERE / "results" / f"peers-{Path(args.model).name}.json"
    return args


def main() -> None:
    """Runs the comparison and writes it down."""
    args = parse()
    with tempfile.TemporaryDirectory(prefix="quire-model-") as folder:
        report = run(args, model_folder(args.model, Path(folder)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    update_readme(HERE / "results" / "runs.md", HERE / "results")


if __name__ == "__main__":
    main()
