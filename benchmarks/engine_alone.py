"""Quire's engine alone, without HTTP and without a second process. Run by `peers.py`.

As the server sets it up, or with `no-prefix-cache`, since mlx-lm's BatchGenerator keeps nothing.
"""

from __future__ import annotations

import sys
import time

from alone import Work, main

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.engine.engine import Engine
from quire.engine.factory import open_engine


def run_level(
    engine: Engine, work: Work, streams: int, prompts: tuple[tuple[int, ...], ...]
) -> int:
    """Tokens that the engine generated, each stream taking the next prompt when free."""
    waiting = iter(enumerate(prompts))

    def add_next() -> None:
        following = next(waiting, None)
        if following is not None:
            number, prompt = following
            engine.add(
                Request(
                    id=f"{streams}-{number}",
                    prompt=prompt,
                    sampling=SamplingParams(temperature=0.0),
                    max_tokens=work.max_tokens,
                    stop_token_ids=frozenset(work.stop_ids),
                )
            )

    for _ in range(streams):
        add_next()
    tokens = 0
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise SystemExit(f"a request failed: {output.error.message}")
            tokens += len(output.token_ids)
            if output.finish is not None:
                add_next()
    return tokens


def measure(work: Work) -> dict[int, float]:
    """Tokens per second at each number of streams."""
    keeps = "no-prefix-cache" not in sys.argv[1:]
    engine = open_engine(EngineConfig(work.model, prefix_cache=keeps))
    run_level(engine, work, *work.levels[0])
    rates: dict[int, float] = {}
    for streams, prompts in work.levels:
        started = time.perf_counter()
        tokens = run_level(engine, work, streams, prompts)
        rates[streams] = tokens / (time.perf_counter() - started)
    return rates


if __name__ == "__main__":
    main(measure)
