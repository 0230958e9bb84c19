"""Measures the HTTP side by itself: `http_side.py FOLDER [TREE ...]`.

The folder has a model of `make_tiny_model.py`, of which only the tokenizer is read: the engine's
process is `http_worker.py`, whose steps take as long as they are told. Trees are checkouts that are
compared in alternating rounds; this one if none is named. Processor time is that of the server's
process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
from pathlib import Path

import psutil
from servers import Serving, free_port, own_server

from quire.api.server import serve
from quire.cli.load import Target, Timings, closed_loop
from quire.core.config import EngineConfig, ModelConfig, ServerConfig

_HERE = Path(__file__).resolve().parent
_STREAMS, _REQUESTS, _TOKENS = 32, 1024, 512
_MANY = 256
_LIMIT_S = 120.0
_GATHERED_MS, _SINGLE_MS = 5.0, 10.0
"""Steps of 32 streams whose tokens go out together, as more than 4,000 a second do, and each by
itself."""
_WORDS = "word " * 100


def serving(tree: Path, folder: Path, step_ms: float) -> Serving:
    """Return a context of a server of a tree's sources around scripted steps, and its process."""
    port = free_port()
    command = [sys.executable, __file__, str(folder), "--serve", str(port), str(step_ms)]
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{_HERE}"}
    return own_server(command, environment, port)


def serve_scripted(folder: Path, port: int, step_ms: float) -> int:
    """Serve in this process, with the sources of the tree that is measured."""
    config = ServerConfig(port=port, served_name="scripted", log_level="warning")
    engine = EngineConfig(str(folder), step_ms=step_ms)
    return serve((ModelConfig(engine, config),), config, "http_worker")


def answers(
    target: Target, route: str, requests: int, tokens: int, streams: int = _STREAMS
) -> list[Timings]:
    """Stream answers, `streams` at once: to prompts of 128 token ids, or to a message of 100
    words.
    """
    draw = random.Random(1)
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    bodies = []
    for _ in range(requests):
        ids = [draw.randrange(10, 256) for _ in range(128)]
        message = {"role": "user", "content": _WORDS}
        asked = {"prompt": ids} if route == "/completions" else {"messages": [message]}
        bodies.append(json.dumps(body | asked).encode())
    exchanges = asyncio.run(closed_loop(target, route, bodies, streams, _LIMIT_S))
    found = [each.timings() for each in exchanges]
    for answer in found:
        if answer.error is not None or answer.tokens != tokens:
            raise SystemExit(f"{answer.tokens} tokens: {answer.error}")
    return found


def first_ms(found: list[Timings]) -> tuple[float, float]:
    """Return the milliseconds from the first request to the median and the last first token."""
    started = min(answer.started for answer in found)
    firsts = [(answer.text_times[0] - started) * 1e3 for answer in found]
    return statistics.median(firsts), max(firsts)


def spent_s(process: psutil.Process) -> float:
    """Return processor time so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measured(tree: Path, folder: Path) -> dict[str, float]:
    """Measure one server for requests, and another for tokens."""
    row = {}
    with serving(tree, folder, 0.0) as (target, process):
        for route in ("/completions", "/chat/completions"):
            answers(target, route, 2 * _STREAMS, 1)
            before = spent_s(process)
            answers(target, route, _REQUESTS, 1)
            row[f"{route}, ms a request"] = (spent_s(process) - before) / _REQUESTS * 1e3
    with serving(tree, folder, _SINGLE_MS) as (target, _):
        for streams, bursts in ((_STREAMS, 9), (_MANY, 3)):
            found = [
                first_ms(answers(target, "/completions", streams, 1, streams=streams))
                for _ in range(bursts)
            ]
            middle, last = map(statistics.median, zip(*found, strict=True))
            row[f"median first token of {streams} requests at once, ms"] = middle
            row[f"last first token of {streams} requests at once, ms"] = last
    for step_ms in (_GATHERED_MS, _SINGLE_MS):
        with serving(tree, folder, step_ms) as (target, process):
            answers(target, "/completions", 2 * _STREAMS, 1)
            before = spent_s(process)
            answers(target, "/completions", _STREAMS, 1)
            requests_s = spent_s(process) - before
            before = spent_s(process)
            answers(target, "/completions", _STREAMS, _TOKENS + 1)
            used_s = spent_s(process) - before - requests_s
            row[f"steps of {step_ms:g} ms, us a token"] = used_s / (_STREAMS * _TOKENS) * 1e6
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("trees", type=Path, nargs="*", default=[_HERE.parent])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", nargs=2, metavar=("PORT", "MS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        sys.exit(serve_scripted(args.folder, int(args.serve[0]), float(args.serve[1])))
    trees = [tree.resolve() for tree in args.trees]
    rows: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
    for number in range(args.rounds):
        for tree in trees if number % 2 == 0 else reversed(trees):
            rows[tree].append(measured(tree, args.folder.resolve()))
    for name in rows[trees[0]][0]:
        medians = [statistics.median(row[name] for row in rows[tree]) for tree in trees]
        print(f"{name}: " + ", ".join(f"{value:.3g}" for value in medians))


if __name__ == "__main__":
    main()
