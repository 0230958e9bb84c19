"""Bursts of 1 to 256 streams through the engine: `widths.py FOLDER OUT [WIDTHS] [TOKENS]`.

Prompts have 128 tokens each, all asked at once, twice; answers have TOKENS (60). Speculation is
off, since random weights repeat themselves.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from workload import drawn

from engine import run
from quire.core.config import EngineConfig
from quire.core.processes import freeze_heap
from quire.engine.factory import open_engine

WIDTHS = "1,8,32,64,128,256"


def main(folder: str, out: Path, widths: str = WIDTHS, tokens: str = "60") -> None:
    streams = [int(each) for each in widths.split(",")]
    config = EngineConfig(folder, kv_memory=30 << 30, max_sequences=max(streams), speculate="off")
    engine = open_engine(config)
    freeze_heap()  # as the engine's process does
    rows: list[dict[str, Any]] = []
    for again in range(2):
        for count in streams:
            seeds = (100_000 * again + 1000 * count + n for n in range(count))
            prompts = [drawn(128, seed) for seed in seeds]
            rows.append(run(engine, prompts, int(tokens), f"round {again}, {count} streams"))
            out.write_text(json.dumps({"model": folder, "rows": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
