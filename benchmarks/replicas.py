"""Agents' sessions on two replicas: Quire's router beside round-robin and Ray's prefix-aware one.

    python benchmarks/replicas.py [--sessions 16] [--turns 10] [--router prefix] [--add]

Each session is a replay as in `agent_replay.py`, with one system prompt for all; all run at once.
What counts is how many prompt tokens are computed again, and the time to the first token. Needs the
extra `ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from agent_replay import Session, replay
from servers import Server, running

from quire.cli.bench import run_async
from quire.cli.load import Target, Timings

HERE = Path(__file__).parent
ROUTERS = {
    "prefix": "quire.scale.router:PrefixRouter",
    "prefix, keyed": "quire.scale.router:PrefixRouter",
    "round-robin": "replica_routers:RoundRobin",
    "Ray's prefix-aware": "replica_routers:RayPrefix",
}


def serve(router: str, replicas: int, port: int) -> int:
    """Serve the embedded model by replicas behind a router, until interrupted."""
    from quire.api.server import serve as serve_models
    from quire.core.config import EngineConfig, ModelConfig, ServerConfig
    from quire.demo import MODEL_DIR, NAME
    from quire.scale.deployments import Scaling
    from quire.scale.local import local_opener

    config = ServerConfig(port=port, served_name=NAME, log_level="warning")
    model = ModelConfig(EngineConfig(str(MODEL_DIR)), config)
    return serve_models([model], config, opener=local_opener(Scaling(replicas, router=router)))


async def all_at_once(target: Target, sessions: list[Session]) -> list[list[Timings]]:
    """Replay all sessions at once."""
    replays = [replay(target, "quire-demo", each, max_tokens=8) for each in sessions]
    return await asyncio.gather(*replays)


def summarise(answers: list[list[Timings]]) -> dict[str, Any]:
    """Say what all sessions cost together."""
    turns = [turn for session in answers for turn in session]
    sent = sum(turn.prompt_tokens or 0 for turn in turns)
    cached = sum(turn.cached_tokens or 0 for turn in turns)
    times = [
        1e3 * (turn.ended - turn.started if turn.ttft is None else turn.ttft) for turn in turns
    ]
    started = min(turn.started for turn in turns)
    return {
        "prompt_tokens": sent,
        "computed_tokens": sent - cached,
        "hit_rate": round(cached / sent, 3),
        "ttft_ms": round(median(times), 1),
        "ttft_p90_ms": round(quantiles(times, n=10)[-1], 1),
        "seconds": round(max(turn.ended for turn in turns) - started, 1),
    }


def main() -> int:
    """Replay the sessions before each router and write down what they cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--sessions", type=int, default=16)
    add("--turns", type=int, default=10)
    add("--replicas", type=int, default=2)
    add("--router", action="append", choices=ROUTERS, help="may be given again; default: all")
    add("--add", action="store_true", help="keep the runs in the file of results, and add these")
    add("--serve", help=argparse.SUPPRESS)
    add("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve, args.replicas, args.port)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    first = Session(args.turns, system_words=600, turn_words=60)
    results = HERE / "results" / "replicas.json"
    runs: dict[str, list[Any]] = json.loads(results.read_text())["routers"] if args.add else {}
    for name in args.router or ROUTERS:
        keyed = name.endswith("keyed")
        sessions = [replace(first, name=f"{n} ", keyed=keyed) for n in range(args.sessions)]
        own = ("--serve", ROUTERS[name], "--replicas", str(args.replicas), "--port", "{port}")
        server = Server(name, "quire", peer=False, command=(str(Path(__file__)), *own))
        with running(server, "", sys.executable, reuse=True) as (target, _):
            found = summarise(run_async(all_at_once(target, sessions)))
        runs.setdefault(name, []).append(found)
        print(f"{name}: {json.dumps(found)}", flush=True)
    command = shlex.join(["python", "benchmarks/replicas.py", *sys.argv[1:]])
    report = {"command": command, "sessions": args.sessions, "turns": args.turns, "routers": runs}
    results.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
