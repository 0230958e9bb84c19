"""Quire's engine alone, for `cpu.py`."""

from __future__ import annotations

from functools import partial

from cpu_work import SHORT, Rates, Work, main

from quire.core.config import EngineConfig
from quire.core.processes import freeze_heap
from quire.core.request import Request, SamplingParams
from quire.device.device import open_device
from quire.engine.assembly import assemble
from quire.engine.engine import Engine
from quire.executor.factory import open_executor
from quire.executor.segments.runner import open_segments
from quire.models.weights.loader import open_model

FIRST = 2
"""Number of the first stream's request; prompts that are read alone come before."""
ENDLESS = 1024
"""Tokens that no stream reaches while it is measured."""


def add(engine: Engine, number: int, length: int, tokens: int) -> None:
    """A greedy request with a prompt of its own."""
    prompt = tuple(3 + (i * 7 + number) % 1000 for i in range(length))
    engine.add(Request(f"{number}", prompt, SamplingParams(temperature=0), max_tokens=tokens))


def finish(engine: Engine) -> None:
    """Serves what there is."""
    while engine.has_work:
        engine.step()


def start(engine: Engine, streams: int) -> None:
    """Add streams, and serve them until each has a token: from then on, steps are of all of them.

    Streams begin one after the other, as their prompts fit steps, and so would end.
    """
    for number in range(streams):
        add(engine, FIRST + number, SHORT, ENDLESS)
    begun: set[str] = set()
    while len(begun) < streams:
        begun |= {output.request_id for output in engine.step() if output.token_ids}


def measure(work: Work) -> Rates:
    """Measure the work of `cpu_work.Work`."""
    device = open_device(
        work.blas, work.kernels, work.threads, activation_bits=work.activation_bits
    )
    loaded = open_model(work.model)
    config = EngineConfig(work.model, kv_memory=1 << 30, prefix_cache=False, blas=work.blas)
    segments = open_segments(loaded.model) if work.segments else None
    engine = assemble(loaded, config, open_executor=partial(open_executor, segments=segments))
    rates = Rates(weight_bytes=loaded.parameter_bytes, computes=work.blas)
    if (kernels := device.kernels) is not None:
        bits = f"{kernels.activation_bits}-bit activations"
        rates.computes = f"{kernels.instructions}, {kernels.threads} threads, {bits}"
    freeze_heap()  # as the engine's process does
    for prompt in (SHORT, 2 * SHORT):  # segments are held against the model, in steps of each size
        add(engine, 0, prompt, 3)
        finish(engine)
    if work.prompt:
        add(engine, 1, work.prompt, 1)
        with rates.timed("prompt", work.prompt):
            finish(engine)
    for streams in work.streams:
        start(engine, streams)
        if kernels is not None:
            kernels.ops.measure_segments(True)
        with rates.timed(str(streams), streams * work.tokens):
            for _ in range(work.tokens):
                produced = sum(len(output.token_ids) for output in engine.step())
                assert produced == streams, "a step gives each stream one token"
        if kernels is not None:
            spent = kernels.ops.segment_seconds()
            rates.parts[str(streams)] = {part: time / work.tokens for part, time in spent.items()}
        for number in range(streams):
            engine.abort(f"{FIRST + number}")
        finish(engine)
    return rates


if __name__ == "__main__":
    main(measure)
