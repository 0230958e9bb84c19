"""Quire's engine alone, without HTTP and without a second process. Run by `peers.py`.

It is set up as the server sets it up and reads the prompts that the server reads, as token ids.
With the argument `bare` it keeps no prefixes and drafts nothing, like mlx-lm's BatchGenerator.
With `spread` the first prompts begin one after the other over an answer's length, as a server's do;
without it all of them are read in one step, and answers of one length end together.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from alone import Work, main

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.engine.engine import Engine
from quire.engine.factory import open_engine


def run_level(
    engine: Engine,
    work: Work,
    name: str,
    streams: int,
    prompts: tuple[tuple[int, ...], ...],
    *,
    pause: float = 0.0,
) -> int:
    """Return how many tokens the engine generated; a free stream takes the next prompt.

    Args:
        pause: steps between the first prompts of two streams.
    """
    waiting = iter(enumerate(prompts))

    def add_next() -> None:
        following = next(waiting, None)
        if following is not None:
            number, prompt = following
            engine.add(
                Request(
                    id=f"{name}-{number}",
                    prompt=prompt,
                    sampling=SamplingParams(temperature=0.0),
                    max_tokens=work.max_tokens,
                    stop_token_ids=frozenset(work.stop_ids),
                )
            )

    tokens = steps = begun = 0
    while engine.has_work or begun < streams:
        while begun < streams and begun * pause <= steps:
            add_next()
            begun += 1
        steps += 1
        for output in engine.step():
            if output.error is not None:
                raise SystemExit(f"a request failed: {output.error.message}")
            tokens += len(output.token_ids)
            if output.finish is not None:
                add_next()
    return tokens


def measure(work: Work) -> dict[int, float]:
    """Return tokens per second at each number of streams."""
    config = EngineConfig(work.model)
    if "bare" in sys.argv[1:]:
        config = replace(config, prefix_cache=False, speculate="off")
    engine = open_engine(config)
    run_level(engine, work, "warm", len(work.warm_up), work.warm_up)
    rates: dict[int, float] = {}
    for streams, prompts in work.levels:
        started = time.perf_counter()
        pause = work.max_tokens / streams if "spread" in sys.argv[1:] else 0.0
        tokens = run_level(engine, work, str(streams), streams, prompts, pause=pause)
        rates[streams] = tokens / (time.perf_counter() - started)
    return rates


if __name__ == "__main__":
    main(measure)
