"""Measures the cost of grammars: `bound.py [--model FOLDER] [--tokens 200]`.

Streams in one engine, without HTTP: some free, some whose answers keep to a regular expression. Of
both the tokens a second of a stream while all generate, and how many tokens each got a step.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median

from quire.core.config import EngineConfig
from quire.core.request import GrammarSpec, Request, SamplingParams
from quire.demo import MODEL_DIR
from quire.engine.engine import Engine
from quire.engine.factory import open_engine

LETTERS = GrammarSpec("regex", "[a-z]{400,8000}")
MIXES = ((1, 0), (0, 1), (1, 1), (7, 1), (4, 4), (8, 0), (0, 8))
"""Free streams and bound ones."""


def measured(engine: Engine, free: int, bound: int, tokens: int) -> tuple[float, dict[str, int]]:
    """Return the seconds from the first step in which all generate, and each stream's tokens in
    them.
    """
    greedy = SamplingParams(temperature=0)
    names = [*(f"free{n}" for n in range(free)), *(f"bound{n}" for n in range(bound))]
    for name in names:
        prompt = tuple(random.Random(name).randrange(300, 3000) for _ in range(12))
        grammar = LETTERS if name.startswith("bound") else None
        engine.add(Request(name, prompt, greedy, max_tokens=100 + 3 * tokens, grammar=grammar))
    waiting = set(names)
    while waiting:
        waiting -= {each.request_id for each in engine.step() if each.token_ids}
    got = dict.fromkeys(names, 0)
    started = time.perf_counter()
    for _ in range(tokens):
        for output in engine.step():
            got[output.request_id] += len(output.token_ids)
    seconds = time.perf_counter() - started
    for name in names:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    return seconds, got


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL_DIR))
    parser.add_argument("--tokens", type=int, default=200, help="steps that are timed")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    engine = open_engine(EngineConfig(asked.model, prefix_cache=False))
    measured(engine, 1, 1, 10)
    print("| free | bound | tokens/s, a free stream | a bound one | tokens a step, a bound one |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for free, bound in MIXES:
        rates: dict[str, list[float]] = {"free": [], "bound": []}
        steps: list[float] = []
        for _ in range(asked.rounds):
            seconds, got = measured(engine, free, bound, asked.tokens)
            for name, tokens in got.items():
                rates[name.rstrip("0123456789")].append(tokens / seconds)
            steps += [got[name] / asked.tokens for name in got if name.startswith("bound")]
        cells = [f"{median(each):.0f}" if each else "" for each in rates.values()]
        cells.append(f"{median(steps):.2f}" if steps else "")
        print(f"| {free} | {bound} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
