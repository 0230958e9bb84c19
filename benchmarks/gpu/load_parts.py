"""Times what the milliseconds of a whole load go to: `load_parts.py FOLDER OUT [options]`.

1. Bursts of prompts of 128 tokens, 128 generated each, by `--streams`: the steps by the size of
   their graphs, how long they ran, and how long pools took to grow; each step until all prompts
   are read; for each of `--step-ms`.
2. The graphs of steps that generate, by `--streams`, and of steps that only read prompts, by
   `--reads`: the whole graph, each kernel of its first layers, and each kernel alone: that of all
   layers, one behind the other.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from contexts import Recorded
from step_kernels import parts_of, recorded_kernels
from workload import drawn

from quire.core.config import EngineConfig
from quire.core.processes import freeze_heap
from quire.core.request import Request, SamplingParams
from quire.engine.engine import Engine
from quire.engine.factory import open_engine
from quire.executor.graphs.executor import GraphExecutor

PROMPT = 128
GENERATING = 24
"""Steps that only generate before their graph is timed."""
_NO_HURRY_S = 10.0
Row = dict[str, Any]


def ask(engine: Engine, count: int, tokens: int, seed: int) -> list[str]:
    """Ask about random prompts at once; return the requests' names."""
    names = [f"{seed} {number}" for number in range(count)]
    for number, name in enumerate(names):
        prompt, greedy = drawn(PROMPT, 1000 * seed + number), SamplingParams(temperature=0.0)
        engine.add(Request(name, prompt, greedy, max_tokens=tokens))
    return names


def load(engine: Engine, streams: int, tokens: int, seed: int) -> Row:
    """Run a whole load; return its seconds, and those of its steps by their graphs' rows."""
    budget, parts = (
        engine._scheduler.prefill_budget,
        defaultdict[str, list[tuple[int, float]]](list),
    )
    observe, order = budget.observe, list[dict[str, Any]]()

    def observed(
        decode_rows: int,
        chunks: int,
        prompt_rows: int,
        seconds: float,
        *,
        keys: int = 0,
        graphed: bool = False,
    ) -> None:
        rows = decode_rows + prompt_rows
        kind = "both" if decode_rows and prompt_rows else "read" if prompt_rows else "generate"
        size = 1 << (rows - 1).bit_length() if graphed or not prompt_rows else "eager"
        parts[f"{kind} {size}"].append((rows, seconds))
        order.append({"rows": rows, "generating": decode_rows, "graphed": graphed})
        order[-1] |= {"ms": round(seconds * 1e3, 1)}
        observe(decode_rows, chunks, prompt_rows, seconds, keys=keys, graphed=graphed)

    pools, resizes = engine._executor.pools, list[float]()  # type: ignore[attr-defined]
    resize = pools.resize

    def resized(change: Any) -> None:
        began = time.perf_counter()
        resize(change)
        resizes.append(time.perf_counter() - began)

    budget.observe, pools.resize = observed, resized  # type: ignore[method-assign]
    started, first = time.perf_counter(), dict[str, float]()
    ask(engine, streams, tokens, seed)
    steps = reading = 0
    while engine.has_work:
        outputs, steps = engine.step(), steps + 1
        for each in outputs:
            if each.token_ids:
                first.setdefault(each.request_id, time.perf_counter() - started)
        if len(first) < streams:
            reading = len(order) + 1
    ended = time.perf_counter() - started
    budget.observe, pools.resize = observe, resize  # type: ignore[method-assign]
    kinds = {
        kind: {
            "steps": len(own),
            "rows": round(sum(rows for rows, _ in own) / len(own)),
            "seconds": round(sum(seconds for _, seconds in own), 4),
        }
        for kind, own in parts.items()
    }
    return {
        "streams": streams,
        "seconds": round(ended, 3),
        "last first token, s": round(max(first.values()), 3),
        "steps": steps,
        "in steps, s": round(sum(each["seconds"] for each in kinds.values()), 3),
        "in pools that grow, s": [round(each, 4) for each in resizes],
        "kinds": kinds,
        "steps to the last first token": order[:reading],
    }


def loads(engine: Engine, asked: argparse.Namespace) -> list[Row]:
    """Run all loads twice in turns: graphs are recorded in the first round."""
    budget, found = engine._scheduler.prefill_budget, list[Row]()
    for again in range(2):
        for step_ms in asked.step_ms:
            budget._step_s = step_ms / 1e3
            for streams in asked.streams:
                seed = 10_000 * again + 1000 * step_ms + streams
                row = load(engine, streams, asked.tokens, seed)
                found.append({"round": again, "step_ms": step_ms, **row})
                print(json.dumps(found[-1]), flush=True)
    return found


def timed(engine: Engine, recorded: Recorded, rows: int, kernels: int) -> Row:
    """Time the graph that was launched last, for at most `rows` rows, and its first kernels."""
    executor = engine._executor
    assert isinstance(executor, GraphExecutor), "steps run as graphs"
    whole = recorded.milliseconds(launches=10)
    found, launches, kept = recorded_kernels(executor, "plain", rows)
    return {
        "rows": rows,
        "graph, ms": whole and round(whole, 3),
        "kernels": len(found),
        "parts": parts_of(recorded, found, launches, kept, kernels),
    }


def graphs(engine: Engine, recorded: Recorded, asked: argparse.Namespace) -> list[Row]:
    """Time the graphs of steps that only read, and of steps that only generate."""
    budget, found = engine._scheduler.prefill_budget, list[Row]()
    budget._step_s = _NO_HURRY_S
    for kind, sizes in (("read", asked.reads), ("generate", asked.streams)):
        for rows in sizes:
            for again in range(2 if kind == "read" else 1):  # the first one verifies a graph
                count, seed = rows if kind == "generate" else rows // PROMPT, 77 + again
                names, own = ask(engine, count, 100, rows + seed), set[str]()
                while len(own) < count:
                    own |= {each.request_id for each in engine.step() if each.token_ids}
                    if kind == "read":
                        break
                for _ in range(GENERATING if kind == "generate" else 0):
                    engine.step()
                if kind == "generate" or again:
                    size = 1 << (rows - 1).bit_length()
                    row = timed(engine, recorded, size, kernels=asked.kernels)
                    found.append({"kind": kind, **row})
                    print(*[f"{name} {value}" for name, value in found[-1].items()][:4])
                    for part in row["parts"]:
                        print("  ", *part.values(), flush=True)
                for name in names:
                    engine.abort(name)
                while engine.has_work:
                    engine.step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--streams", type=int, nargs="*", default=[32, 128, 256])
    parser.add_argument("--reads", type=int, nargs="*", default=[1024, 2048])
    parser.add_argument("--step-ms", type=int, nargs="*", default=[60])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--kernels", type=int, default=40)
    asked = parser.parse_args()
    config = EngineConfig(
        asked.folder,
        kv_memory=30 << 30,
        max_sequences=max(64, *asked.streams),
        speculate="off",  # random weights repeat themselves
    )
    engine = open_engine(config)
    freeze_heap()  # as the engine's process does
    found: dict[str, Any] = {"model": asked.folder, "loads": loads(engine, asked)}
    asked.out.write_text(json.dumps(found, indent=1))
    recorded = Recorded(engine._executor._graphs)  # type: ignore[attr-defined]
    found["graphs"] = graphs(engine, recorded, asked)
    asked.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
