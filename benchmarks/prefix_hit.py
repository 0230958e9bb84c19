"""Measures a prefix hit: TTFT cold and warm, and the time to plan the hit.

    python benchmarks/prefix_hit.py [--model FOLDER] [--tokens 16000] [--out FILE]

The warm prompt is the cold one with another last token, so it parts in the middle of a page.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.demo import MODEL_DIR
from quire.device.device import open_device
from quire.engine.assembly import assemble
from quire.engine.engine import Engine
from quire.models.weights.loader import open_model

_WARM_RUNS = 5


def first_token_s(engine: Engine, name: str, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Return seconds from the request to its first token, and the tokens that were reused."""
    started = time.perf_counter()
    engine.add(Request(name, prompt, SamplingParams(temperature=0), max_tokens=1))
    while True:
        for output in engine.step():
            if output.token_ids:
                return time.perf_counter() - started, output.cached_tokens


def planning_s(engine: Engine, prompt: tuple[int, ...]) -> float:
    """Return seconds that the scheduler takes to admit a prompt that hits: hashing, matching,
    sharing.
    """
    scheduler = engine._scheduler
    engine.add(Request("planned", prompt, SamplingParams(temperature=0), max_tokens=1))
    started = time.perf_counter()
    plan = scheduler.schedule()
    seconds = time.perf_counter() - started
    assert plan is not None, "the prompt was not admitted"
    scheduler.abort("planned")
    scheduler.take_outputs()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(MODEL_DIR))
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    open_device("auto")
    engine = assemble(open_model(args.model), EngineConfig(args.model))
    rng = random.Random(0)
    top = min(3000, engine.info.vocab_size)
    prompt = tuple(rng.randrange(300, top) for _ in range(args.tokens))
    first_token_s(engine, "warm-up", prompt[:50][::-1])
    cold, reused = first_token_s(engine, "cold", prompt)
    assert reused == 0, "the cold prompt was not cold"
    warm = []
    for run in range(_WARM_RUNS):
        seconds, reused = first_token_s(engine, f"warm{run}", (*prompt[:-1], 290 - run))
        warm.append(seconds)
    result = {
        "tokens": args.tokens,
        "cold_ttft_s": round(cold, 3),
        "warm_ttft_s": round(statistics.median(warm), 4),
        "ratio": round(cold / statistics.median(warm), 1),
        "reused_tokens": reused,
        "planning_ms": round(1e3 * planning_s(engine, (*prompt[:-1], 280)), 2),
    }
    print(json.dumps(result, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
