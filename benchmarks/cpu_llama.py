"""llama.cpp by its own `llama-batched-bench`, for `cpu.py`.

The program chooses no tokens: what sampling takes is not in its times, but in Quire's. Several
threads spin while they wait, so that their processor time is that of all threads for as long as the
program runs. One thread's is measured, so that other work on the machine changes it little.
"""

from __future__ import annotations

import json
import resource
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


def processor_seconds(work: Work, prompt: int, tokens: int, streams: Sequence[int]) -> float:
    """Run the program, and return the processor time that it took, opening the model included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    levels(work, prompt, tokens, streams)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def rates_of_one_thread(work: Work) -> dict[str, float]:
    """Return tokens a second of processor time. A run that does less is subtracted from each."""
    rates: dict[str, float] = {}
    if work.prompt:
        once, often = [1], [1] * 4
        spent = processor_seconds(work, work.prompt, 1, often)
        spent -= processor_seconds(work, work.prompt, 1, once)
        rates["prompt"] = (len(often) - len(once)) * work.prompt / spent
    for streams in work.streams:
        spent = processor_seconds(work, SHORT, 2 * work.tokens, [streams])
        spent -= processor_seconds(work, SHORT, work.tokens, [streams])
        rates[str(streams)] = streams * work.tokens / spent
    return rates


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
    if work.threads == 1:
        rates.cpu = rates_of_one_thread(work)
    return rates


if __name__ == "__main__":
    main(measure)
