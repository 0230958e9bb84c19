"""Holds MLX's peak memory on this device against its promise: weights, KV budget and a tenth of it.

`memory_peak.py FOLDER OUT [FORMAT...]`, formats as in `--kv-format`, `plain page-4 turbo-4` unless
said otherwise. Each format fills the budget in turn, so that pools grow, shrink and are converted.
Ends with 1 if a peak is higher. OUT gets the figures as JSON.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from quire.core.config import EngineConfig
from quire.core.kv_choice import parse_format
from quire.core.request import Request, SamplingParams
from quire.device.device import current_device
from quire.engine.engine import Engine
from quire.engine.factory import open_engine

BUDGET = 8 << 30
PROMPT, TOKENS, WIDTH = 4_000, 16, 16
"""Tokens of a prompt and of its answer; requests at once."""
FULL = 0.9
"""Share of the budget that has to be claimed, or nothing has been shown."""


def fill(engine: Engine, format: str) -> int:
    """Serve prompts of one format until their blocks fill the budget, and return the claimed
    bytes.
    """
    capacity = engine._scheduler.manager.capacity
    greedy, claimed, number = SamplingParams(temperature=0), 0, 0
    kv_format = parse_format(format)
    while number < 40 or (claimed < FULL * BUDGET and number < 4_000):
        for _ in range(WIDTH):
            drawn = random.Random(f"{format} {number}")
            prompt = tuple(drawn.randrange(300, 30_000) for _ in range(PROMPT))
            name = f"{format} {number}"
            engine.add(Request(name, prompt, greedy, max_tokens=TOKENS, kv_format=kv_format))
            number += 1
        while engine.has_work:
            engine.step()
            claimed = max(claimed, capacity.claimed)
    return claimed


def measure(engine: Engine, weights: int, format: str) -> dict[str, Any]:
    gc.collect()
    mx.reset_peak_memory()
    claimed = fill(engine, format)
    most = weights + 1.1 * BUDGET
    peak = current_device().memory()["arrays_peak"]
    row = {
        "format": format,
        "weights_bytes": weights,
        "budget_bytes": BUDGET,
        "claimed_bytes": claimed,
        "peak_bytes": peak,
        "beyond_weights_by_budget": (peak - weights) / BUDGET,
        "full": claimed >= FULL * BUDGET,
        "holds": peak < most,
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    folder, out, *formats = sys.argv[1:]
    engine = open_engine(EngineConfig(folder, kv_memory=BUDGET))
    weights = engine.info.weight_bytes
    rows = [measure(engine, weights, each) for each in formats or ("plain", "page-4", "turbo-4")]
    Path(out).write_text(json.dumps(rows, indent=1))
    engine.close()
    return int(not all(row["holds"] and row["full"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
