"""Quire's engine in a process of its own, without HTTP. Run by `served_cost.py --piped`.

It is started and fed as the server does it: requests and tokens cross a socket pair. This process
only reads messages and sends the next prompt where an answer ends. So its tokens/s are the most
that an HTTP side without any cost could reach.
"""

from __future__ import annotations

import time

from alone import Work, main

from quire.core.config import EngineConfig
from quire.core.frames import Frames, encode
from quire.core.messages import Ready, Refused, Submit
from quire.core.request import Request, SamplingParams
from quire.serving.engine_process import EngineProcess, start_engine


def opened(model: str, sequences: int) -> tuple[EngineProcess, Frames]:
    """Start an engine and wait until its model is open."""
    engine = start_engine(EngineConfig(model, max_sequences=sequences), "warning")
    frames = Frames(engine.pipe)
    while not isinstance(message := frames.next(), Ready):
        if isinstance(message, Refused):
            raise SystemExit(message.message)
    return engine, frames


def run_level(
    engine: EngineProcess,
    frames: Frames,
    work: Work,
    name: str,
    streams: int,
    prompts: tuple[tuple[int, ...], ...],
) -> int:
    """Return how many tokens the engine generated; a free stream takes the next prompt."""
    waiting = iter(enumerate(prompts))

    def send_next() -> int:
        following = next(waiting, None)
        if following is None:
            return 0
        number, prompt = following
        request = Request(
            id=f"{name}-{number}",
            prompt=prompt,
            sampling=SamplingParams(temperature=0.0),
            max_tokens=work.max_tokens,
            stop_token_ids=frozenset(work.stop_ids),
        )
        engine.pipe.sendall(encode(Submit((request,))))
        return 1

    running, tokens = sum(send_next() for _ in range(streams)), 0
    while running:
        outputs, further = frames.next()
        for _, ids, *_ in further:
            tokens += len(ids)
        for output in outputs:
            if output.error is not None:
                raise SystemExit(f"a request failed: {output.error.message}")
            tokens += len(output.token_ids)
            if output.finish is not None:
                running += send_next() - 1
    return tokens


def measure(work: Work) -> dict[int, float]:
    """Return tokens per second at each number of streams."""
    most = max(streams for streams, _ in work.levels)
    engine, frames = opened(work.model, max(64, most))
    try:
        run_level(engine, frames, work, "warm", len(work.warm_up), work.warm_up)
        rates: dict[int, float] = {}
        for streams, prompts in work.levels:
            started = time.perf_counter()
            tokens = run_level(engine, frames, work, str(streams), streams, prompts)
            rates[streams] = tokens / (time.perf_counter() - started)
        return rates
    finally:
        engine.end()


if __name__ == "__main__":
    main(measure)
