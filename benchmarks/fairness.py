"""Measures how far a long prompt delays a stream, and a short request that comes meanwhile.

    python benchmarks/fairness.py URL [--tokens 4000] [--repeats 3]

The server is one without other work, started with `--no-prefix-cache`. What is planned, whatever
the machine does meanwhile, `tests/engine/test_fairness.py` holds.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from typing import Any

import httpx

# One token again and again, so that each token is an event: most of what a model would say after
# a random prompt are special tokens, which have no text.
TALK: Any = {"temperature": 0, "ignore_eos": True, "logit_bias": {"1000": 100}, "stream": True}
SHORT = 12
WARM_UP_EVENTS = 30
BEGUN_S = 0.5
"""Seconds from the long request to the short one."""


def prompt(tokens: int) -> list[int]:
    return [random.randrange(300, 3000) for _ in range(tokens)]


def times(http: httpx.Client, tokens: int, most: int) -> Iterator[float]:
    """Yield the time of each token, in seconds from the request on."""
    body = TALK | {"prompt": prompt(tokens), "max_tokens": most}
    started = time.perf_counter()
    with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                yield time.perf_counter() - started


def first_token_s(http: httpx.Client, tokens: int) -> float:
    return next(times(http, tokens, 1))


def measure(http: httpx.Client, tokens: int, idle_s: float) -> str:
    """Run a stream, read a long prompt beside it, and send a short request meanwhile."""
    going, read = threading.Event(), threading.Event()

    def stream() -> list[float]:
        seen = []
        for at in times(http, SHORT, 20_000):
            seen.append(at)
            if len(seen) == WARM_UP_EVENTS:
                going.set()
            if read.is_set():
                break
        return seen

    def read_long() -> float:
        seconds = first_token_s(http, tokens)
        read.set()
        return seconds

    with ThreadPoolExecutor(2) as pool:
        streaming = pool.submit(stream)
        going.wait()
        long = pool.submit(read_long)
        time.sleep(BEGUN_S)
        short_s = first_token_s(http, SHORT)
        late = "; the short one came too late" if read.is_set() else ""
        seen = streaming.result()
    gaps = [after - before for before, after in pairwise(seen)]
    usual, longest = median(gaps), max(gaps[WARM_UP_EVENTS - 1 :])
    return (
        f"gap {usual * 1e3:.1f} ms, longest {longest * 1e3:.1f} ms ({longest / usual:.1f} times); "
        f"first token {short_s * 1e3:.1f} ms, idle {idle_s * 1e3:.1f} ms "
        f"({short_s / idle_s:.1f} times); read in {long.result():.2f} s{late}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with httpx.Client(base_url=args.url, timeout=600, verify=False) as http:
        idle = [first_token_s(http, SHORT) for _ in range(12)][3:]
        for _ in range(args.repeats):
            print(measure(http, args.tokens, median(idle)))


if __name__ == "__main__":
    main()
