"""llama.cpp by its own `llama-batched-bench`, for `cpu.py`.

The program chooses no tokens: what sampling takes is not in its times, but in Quire's. Its threads
spin while they wait, so that its processor time is that of all threads for as long as it runs.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpu_work import SHORT, Rates, Work, main

_BATCH = 512  # tokens that it reads together


def levels(work: Work, prompt: int, tokens: int, streams: Sequence[int]) -> list[dict[str, Any]]:
    """Run the program: a line for each number of streams."""
    context = max(streams) * max(_BATCH, prompt + tokens)
    numbers = {
        "-c": context,
        "-b": _BATCH,
        "-ub": _BATCH,
        "-npp": prompt,
        "-ntg": tokens,
        "-npl": ",".join(map(str, streams)),
        "-t": work.threads,
        "-tb": work.threads,
        "-ngl": 0,
    }
    asked = [part for pair in numbers.items() for part in map(str, pair)]
    command = [work.llama, "-m", work.model, *asked, "--output-format", "jsonl"]
    if not work.repacks:
        command.append("--no-repack")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or len(lines) != len(streams):
        raise SystemExit(f"{work.llama} ended with {done.returncode}: {done.stderr[-1000:]}")
    return [json.loads(line) for line in lines]


def measure(work: Work) -> Rates:
    """Measure the work of `cpu_work.Work`."""
    name = Path(work.llama).parent.name
    rates = Rates(
        weight_bytes=Path(work.model).stat().st_size, computes=f"{name}, {work.threads} threads"
    )
    if work.prompt:
        (read,) = levels(work, work.prompt, 1, [1])
        rates.wall["prompt"] = read["speed_pp"]
    for level in levels(work, SHORT, work.tokens, work.streams):
        rates.wall[str(level["pl"])] = level["speed_tg"]
    rates.cpu = {what: rate / max(1, work.threads) for what, rate in rates.wall.items()}
    return rates


if __name__ == "__main__":
    main(measure)
