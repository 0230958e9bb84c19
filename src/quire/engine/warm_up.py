"""Runs a model through made-up requests before it serves, so that no kernel is compiled later.

A GPU's kernels are compiled when they are first needed, seconds each. Streams would stand still
meanwhile, and the prefill budget would take the time for a prompt's. MLX keeps what it compiled on
disk, so a second start is short.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import mlx.core as mx

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.engine.engine import Engine
from quire.models.loader import LoadedModel

log = logging.getLogger("quire.engine")

_NO_HURRY_MS = 1e9
"""A step's time, so that chunks double up to the most that a step reads."""
_TOKENS = 4
_SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=0)


def warm_up(
    loaded: LoadedModel,
    config: EngineConfig,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Runs an engine of its own, which is thrown away: nothing that it learns or keeps is left.

    Args:
        told: called with the batches of requests that have run, and with the number of all.
    """
    begun = time.perf_counter()
    own = replace(
        config, step_ms=_NO_HURRY_MS, stall_factor=_NO_HURRY_MS, prefix_cache=False, disk=None
    )
    engine = Engine(loaded, own)
    rounds = list(_rounds(config, loaded.model.vocab_size, engine.info.context_length))
    for number, requests in enumerate(rounds):
        told(number, len(rounds))
        for request in requests:
            engine.add(request)
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    log.warning("warming up: %s", output.error.message)
    told(len(rounds), len(rounds))
    del engine
    mx.clear_cache()
    log.info("kernels are ready after %.1f s", time.perf_counter() - begun)


def _rounds(config: EngineConfig, vocabulary: int, context: int) -> Iterator[list[Request]]:
    """Batches of requests that are served together."""

    def request(name: str, length: int, sampling: SamplingParams) -> Request:
        prompt = tuple(token % vocabulary for token in range(length))
        return Request(f"warm-up-{name}", prompt, sampling=sampling, max_tokens=_TOKENS)

    greedy = SamplingParams(temperature=0.0)
    # Chunks of every size, up to two of the largest.
    longest = max(1, min(4 * config.max_step_tokens, context - _TOKENS))
    yield [request("prompt", longest, greedy)]
    streams = 1
    while True:
        names = [f"{streams}-{number}" for number in range(streams)]
        yield [request(name, 4, greedy) for name in names]
        yield [request(name, 4, _SAMPLED) for name in names]
        # One reads its prompt beside those that generate.
        yield [request(name, 40 * (number == 0) + 2, greedy) for number, name in enumerate(names)]
        if streams >= config.max_sequences:
            return
        streams = min(2 * streams, config.max_sequences)
