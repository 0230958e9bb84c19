"""`LLM.generate` beside the engine driven directly, in turns in one run, on the embedded model.

    python benchmarks/python_batch.py [--prompts 1000] [--tokens 24] [--rounds 3] [--model MODEL]

The reference is the engine in this process, with the settings, threads and requests that `LLM`'s
engine has, and no text: neither side encodes prompts, and only `LLM` decodes answers. Which of both
goes first changes every round. Beside the clock, which other work on the machine bends, it prints
processor time: of the engine alone, of the program and its engine's process, and of all else that
ran on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from quire import LLM
from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.demo import MODEL_DIR
from quire.engine.engine import Engine
from quire.engine.factory import open_engine

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
Prompts = list[tuple[int, ...]]


def children_s() -> float:
    """Return the processor time of the running child processes."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        children = (task / "children").read_text().split()
        for child in children:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total * _TICK_S


def machine_s() -> float:
    """Return the processor time of everything that has run on the machine."""
    user, nice, system, _, _, *others = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(map(int, (user, nice, system, *others[:3]))) * _TICK_S


def made(count: int, vocabulary: int, seed: int) -> Prompts:
    """Return prompts of 8 to 40 tokens."""
    rng = random.Random(seed)
    return [
        tuple(rng.randrange(3, vocabulary) for _ in range(rng.randint(8, 40))) for _ in range(count)
    ]


def by_engine(engine: Engine, prompts: Prompts, tokens: int) -> int:
    """Answer all prompts; return the number of tokens."""
    greedy = SamplingParams(temperature=0.0)
    for number, prompt in enumerate(prompts):
        engine.add(Request(f"{number}", prompt, greedy, max_tokens=tokens))
    count = 0
    while engine.has_work:
        for output in engine.step():
            count += len(output.token_ids)
    return count


def by_python(llm: LLM, prompts: Prompts, tokens: int) -> int:
    """Answer all prompts in one call; return the number of tokens."""
    answers = llm.generate(prompts, max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return sum(each.usage.completion_tokens for each in answers)


def timed(run: Callable[[], int]) -> tuple[float, float, float, float, int]:
    """Return seconds by the clock, of this process, of its children and of all else, and the
    tokens.
    """
    whole, own, back, clock = machine_s(), time.process_time(), children_s(), time.perf_counter()
    count = run()
    seconds, own, back = time.perf_counter() - clock, time.process_time() - own, children_s() - back
    return seconds, own, back, machine_s() - whole - own - back, count


def main() -> None:
    """Print a line a round, and the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(MODEL_DIR))
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    engine = open_engine(EngineConfig(given.model, prefix_cache=False))
    vocabulary = engine.info.vocab_size
    ratios: dict[str, list[float]] = {"wall": [], "processor": []}
    with LLM(given.model, prefix_cache=False) as llm:
        by_engine(engine, made(64, vocabulary, -1), given.tokens)
        by_python(llm, made(64, vocabulary, -1), given.tokens)
        for number in range(given.rounds):
            prompts = made(given.prompts, vocabulary, number)
            runs = [partial(by_engine, engine), partial(by_python, llm)]
            order = runs if number % 2 == 0 else runs[::-1]
            spent = {run.func: timed(partial(run, prompts, given.tokens)) for run in order}
            wall, cpu, _, beside, expected = spent[by_engine]
            their_wall, front, back, their_beside, count = spent[by_python]
            assert count == expected, f"{count} tokens by Python, {expected} by the engine"
            ratios["wall"].append(wall / their_wall)
            ratios["processor"].append(cpu / (front + back))
            print(
                f"{count} tokens: engine {wall:.2f} s ({cpu:.2f} s of processor, {beside:.2f} s of "
                f"others), Python {their_wall:.2f} s ({front:.2f} s + {back:.2f} s, "
                f"{their_beside:.2f} s of others)",
                flush=True,
            )
    print(json.dumps({name: round(median(each), 3) for name, each in ratios.items()}))


if __name__ == "__main__":
    main()
