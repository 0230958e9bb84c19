"""Runs made-up requests before the model serves, so that no kernel is compiled later.

A GPU's kernels are compiled when first needed, seconds each. Streams would stall meanwhile, and the
prefill budget would take the time for a prompt's. Compiled kernels are cached on disk, so the
second start of a model loads only what the first requests need.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from quire.core.config import EngineConfig
from quire.core.request import Embed, Request, SamplingParams
from quire.device.device import current_device
from quire.device.verified import Check, Verification, verified_kernels
from quire.engine.assembly import OpenExecutor, assemble
from quire.engine.engine import Engine
from quire.executor.factory import open_executor
from quire.models.base import LanguageModel
from quire.models.weights.loader import LoadedModel
from quire.scheduler.draft_lengths import EveryDraft
from quire.scheduler.drafts import Draft, Drafter, DraftQuery, LookupDrafter
from quire.scheduler.measured_steps import MeasuredSteps

log = logging.getLogger("quire.engine")

_NO_HURRY_MS = 1e9
"""Step time in milliseconds, so long that chunks double up to the largest step."""
_TOKENS = 4
"""Number of tokens that most of these requests generate."""
_FEW_TOKENS = (2, 8)
"""Number of prompt tokens in the first measured steps."""
_FIRST_PROMPT = 300
"""Number of prompt tokens: more than CUDA graphs read."""
_BURST = 32
"""Number of prompts in the first burst."""
_BEGINNING = 16
"""Number of streams that begin in a step at least. Budgets let 32 begin, of four prompt tokens."""
_ADAPTED = 64
"""Number of rows of the largest CUDA graph with adapters."""
_DRAFTS = (1, 3, 7, 15)
"""Numbers of drafts in the measured steps."""
_DRAFTED_STEPS = 8
"""Number of measured steps of each number of drafts. `StepTimes` keeps the last five; the first
ones may load kernels.
"""
_STRIDE = 7919
"""Difference of two tokens of these drafts."""
_GREEDY = SamplingParams(temperature=0.0)
_SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=0)
_ADJUSTED = SamplingParams(
    temperature=0.0, frequency_penalty=0.5, logit_bias=((0, 1.0),), logprobs=1
)


class _Round(NamedTuple):
    """Requests served together: all at once, and one more while these generate."""

    requests: list[Request]
    late: Request | None = None


def warm_up(
    loaded: LoadedModel,
    config: EngineConfig,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    open_executor: OpenExecutor = open_executor,
) -> None:
    """Compile and load kernels with an engine that is discarded afterwards.

    Args:
        on_progress: called with the number of batches of requests that have run, and the number of
            all.
        open_executor: see `assemble`.
    """
    started = time.perf_counter()
    verification = _needed(loaded, config)
    again = current_device().keeps_compiled and verified_kernels().holds(verification)
    engine = _own_engine(loaded, config, open_executor=open_executor)
    vocabulary, context = loaded.model.vocab_size, engine.info.context_length
    if loaded.model.bidirectional:
        rounds = [_Round([each]) for each in _texts(engine, vocabulary)]
    else:
        rounds = list((_few_rounds if again else _rounds)(engine.config, vocabulary, context))
        rounds += _adapted_rounds(engine.config, vocabulary)
    for number, each in enumerate(rounds):
        on_progress(number, len(rounds))
        _serve(engine, each)
    if config.ranks == 1:  # ranks encode together, by plans
        encode_examples(loaded.model)
    if not again:
        engine.prepare()
    on_progress(len(rounds), len(rounds))
    if not again:
        verified_kernels().add(verification)
    del engine
    mx.clear_cache()
    log.info("kernels compiled in %.1f s", time.perf_counter() - started)


def encode_examples(model: LanguageModel) -> None:
    """Load the kernels of encoders. On an H100 the first picture waited 0.9 s for them."""
    for kind, encoder in model.encoders.items():
        try:
            shape = encoder.example_shape
            mx.eval(encoder(mx.zeros((encoder.feature_bytes(shape),), mx.uint8), shape))
        except Exception as problem:  # the server starts even if an extension's encoder fails here
            log.info("the first %s loads its kernels: %s", kind, problem)


def measure_steps(
    loaded: LoadedModel, config: EngineConfig, open_executor: OpenExecutor = open_executor
) -> MeasuredSteps:
    """Measure steps that read 2, 8, 32, 64, 128, ... prompt tokens, up to one of `step_ms`.

    Each is run twice alone and twice beside a stream, and the faster run counts. So the first burst
    of requests after a start is read like any other. Steps that verify 1, 3, 7 and 15 drafts are
    measured as well.

    Args:
        open_executor: see `assembly.assemble`.
    """
    engine = _own_engine(loaded, config, open_executor=open_executor)
    vocabulary = loaded.model.vocab_size
    if loaded.model.bidirectional:
        for text in _texts(engine, vocabulary):
            for _ in range(2):
                _serve(engine, _Round([text]))
            if (engine.step_times.reading.seconds(len(text.prompt)) or 0.0) > config.step_ms / 1e3:
                break
        return engine.step_times
    most = min(engine.config.max_step_tokens, engine.info.context_length - _TOKENS)
    sizes = [*_FEW_TOKENS, *(32 << n for n in range(most.bit_length()))]
    for rows in (size for size in sizes if size <= most):
        prompt = replace(
            _request("prompt", rows, vocabulary=vocabulary, sampling=_GREEDY), max_tokens=2
        )
        stream = _request("stream", 1, vocabulary=vocabulary, sampling=_GREEDY)
        for served in 2 * [_Round([prompt]), _Round([stream], late=prompt)]:
            _serve(engine, served)
        if (engine.step_times.reading.seconds(rows) or 0.0) > config.step_ms / 1e3:
            break
    for drafts in _DRAFTS:
        drafter = _WrongDrafts(drafts, vocabulary)
        drafting = _own_engine(
            loaded,
            config,
            step_times=engine.step_times,
            drafters=(drafter,),
            open_executor=open_executor,
        )
        stream = replace(
            _request("drafted", 1, vocabulary=vocabulary, sampling=_GREEDY),
            max_tokens=1 + _DRAFTED_STEPS + drafts,  # the first token is the prompt's
        )
        if drafting.info.context_length > stream.max_tokens:
            _serve(drafting, _Round([stream]))
    mx.clear_cache()
    return engine.step_times


def _texts(engine: Engine, vocabulary: int) -> Iterator[Request]:
    """Return texts of growing length for an encoder, which reads each in one step."""
    most = min(engine.config.max_step_tokens, engine.info.context_length)
    for rows in (*_FEW_TOKENS, *(32 << n for n in range(most.bit_length()))):
        if rows <= most:
            text = _request(f"{rows}", rows, vocabulary=vocabulary, sampling=_GREEDY)
            yield replace(text, task=Embed("mean"))


class _WrongDrafts(LookupDrafter):
    """Drafts tokens that are never accepted, to measure the time of a step that verifies them.

    The tokens differ, as those of real drafts: equal ones would share their experts.

    Args:
        count: number of drafted tokens.
        vocab_size: tokens are below it.
    """

    name = "wrong"
    looks_ahead = False

    def __init__(self, count: int, vocab_size: int) -> None:
        self._tokens = tuple((n + 1) * _STRIDE % vocab_size for n in range(count))

    def draft(self, query: DraftQuery) -> Draft | None:
        return Draft(self._tokens[: query.limit], self.name)


def _own_engine(
    loaded: LoadedModel,
    config: EngineConfig,
    step_times: MeasuredSteps | None = None,
    drafters: Sequence[Drafter] = (),
    open_executor: OpenExecutor = open_executor,
) -> Engine:
    """Open an engine that reads as much in a step as possible, and verifies every draft."""
    own = replace(
        config,
        step_ms=_NO_HURRY_MS,
        stall_factor=_NO_HURRY_MS,
        prefix_cache=False,
        disk=None,
        speculate="auto",
    )
    return assemble(
        loaded,
        own,
        drafters=drafters,
        draft_lengths=EveryDraft(),
        step_times=step_times,
        open_executor=open_executor,
    )


def _serve(engine: Engine, served: _Round) -> None:
    late = served.late
    for request in served.requests:
        engine.add(request)
    silent = {request.id for request in served.requests}  # no token has come
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                log.warning("warm-up request failed: %s", output.error.message)
            if output.token_ids:
                silent.discard(output.request_id)
        if late is not None and not silent:
            engine.add(late)
            late = None


def _needed(loaded: LoadedModel, config: EngineConfig) -> Verification:
    """Return the check whose result says that all kernels for this model and configuration are
    compiled.
    """
    own = (
        config.kv_format,
        config.kv_skip_layers,
        config.block_size,
        config.max_sequences,
        config.max_step_tokens,
        config.max_context,
        config.batch_invariant,
        config.ranks,
    )
    return Verification(Check.COMPILED, (loaded.fingerprint, *own))


def _request(name: str, length: int, vocabulary: int, sampling: SamplingParams) -> Request:
    prompt = tuple(token % vocabulary for token in range(length))
    return Request(f"warm-up-{name}", prompt, sampling=sampling, max_tokens=_TOKENS)


def _few_rounds(config: EngineConfig, vocabulary: int, context: int) -> Iterator[_Round]:
    """Load the kernels of a first request and of a first burst. Others are loaded when needed."""
    length = _first_length(config, context)
    for sampling in (_GREEDY, _SAMPLED):
        yield _Round([_request("prompt", length, vocabulary=vocabulary, sampling=sampling)])
    yield _burst(config, vocabulary, context)


def _burst(config: EngineConfig, vocabulary: int, context: int) -> _Round:
    """Return prompts that arrive together, so that steps read several beside running streams."""
    longest, count = (
        max(1, min(_FIRST_PROMPT, context - _TOKENS)),
        min(_BURST, config.max_sequences),
    )
    lengths = [longest - n * longest // (2 * count) for n in range(count)]
    return _Round(
        [
            _request(f"{n}", lengths[n], vocabulary=vocabulary, sampling=_GREEDY)
            for n in range(count)
        ]
    )


def _adapted_rounds(config: EngineConfig, vocabulary: int) -> Iterator[_Round]:
    """Return every number of streams with an adapter, up to the most that are graphed."""
    for name, _ in config.adapters[:1]:
        streams = 1
        while streams <= min(config.max_sequences, _ADAPTED):
            asked = [
                _request(f"{number}", 4, vocabulary=vocabulary, sampling=_GREEDY)
                for number in range(streams)
            ]
            yield _Round([replace(each, adapter=name) for each in asked])
            streams *= 2


def _first_length(config: EngineConfig, context: int) -> int:
    return max(1, min(_FIRST_PROMPT, config.max_step_tokens, context - _TOKENS))


def _rounds(config: EngineConfig, vocabulary: int, context: int) -> Iterator[_Round]:
    """Return chunks of every size, a burst, every number of streams, and chunks beside streams."""

    def request(name: str, length: int, sampling: SamplingParams) -> Request:
        return _request(name, length, vocabulary=vocabulary, sampling=sampling)

    # Chunks up to two of the largest.
    longest = max(1, min(4 * config.max_step_tokens, context - _TOKENS))
    yield _Round([request("prompt", longest, _GREEDY)])
    # Numbers of rows that steps are recorded for, and products cut by, beyond those of streams.
    for rows in (2, 8, 16, 32, 64, 128, 256, 512, 1024, 2048):
        if rows > 4 * config.max_sequences or config.max_sequences == 1:
            # With one sequence no prompt comes late.
            sampling = _ADJUSTED if rows == 2 else _GREEDY
            yield _Round([request(f"{rows} rows", min(rows, longest), sampling)])
    yield _burst(config, vocabulary, context)
    late = request("late", _first_length(config, context), _ADJUSTED)
    streams = 1
    while True:
        # The last stream begins while the first still generates.
        answer = _TOKENS + streams // _BEGINNING
        for sampling in (_GREEDY, _SAMPLED):
            stream = replace(request("", 4, sampling), max_tokens=answer)
            yield _Round([replace(stream, id=f"{number}") for number in range(streams)])
        if others := min(streams, config.max_sequences - 1):
            # One alone fills a block beside the prompt: formats with tails code it in that step.
            length = min(longest, max(2, config.block_size - 2)) if streams == 1 else 2
            stream = replace(request("", length, _GREEDY), max_tokens=answer)
            yield _Round([replace(stream, id=f"{number}") for number in range(others)], late)
        if streams >= config.max_sequences:
            return
        streams = min(2 * streams, config.max_sequences)
