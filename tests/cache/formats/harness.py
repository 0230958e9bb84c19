"""Runs requests through a real engine and compares what they got with what each gets alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.request import FinishReason, Request, SamplingParams
from quire.engine.assembly import assemble
from quire.engine.engine import Engine
from quire.executor.step import SampledRow
from quire.models.weights.loader import LoadedModel

TOLERANCE = 1e-4


@dataclass
class Answers:
    """Answers of requests, by id."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[str, list[np.ndarray]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0


@dataclass
class Bench:
    """One model and how its engine is set up."""

    loaded: LoadedModel
    kv_memory: int = 32 << 20
    max_step_tokens: int = 2048
    prefix_cache: bool = False
    kv_format: KVFormat = field(default_factory=KVFormat)

    def engine(self, seen: list[tuple[list[tuple[str, int]], mx.array]]) -> Engine:
        """Return an engine whose logits are collected in `seen`."""

        def observe(rows: list[SampledRow], logits: mx.array) -> None:
            seen.append(([(row.id, row.position) for row in rows], logits))

        config = EngineConfig(
            model=str(self.loaded.path),
            kv_memory=self.kv_memory,
            kv_format=self.kv_format,
            kv_skip_layers=(),
            max_step_tokens=self.max_step_tokens,
            prefix_cache=self.prefix_cache,
            # No clock decides how prompts are cut.
            step_ms=1e6,
            stall_factor=1e6,
        )
        return assemble(self.loaded, config, observe)

    def bytes_for(self, format: KVFormat, tokens: int) -> int:
        """Return the bytes of KV memory that one sequence of so many tokens takes."""
        return self.engine([])._scheduler.limits.worst_case_bytes(format, tokens)

    def run(
        self,
        *rounds: list[Request],
        gap: int = 0,
        cancel: tuple[str, int] | None = None,
    ) -> Answers:
        """Serves rounds of requests, one round after the other, in one engine.

        Args:
            gap: steps between two arrivals; 0 is all at once.
            cancel: (request, step) to abort.
        """
        seen: list[tuple[list[tuple[str, int]], mx.array]] = []
        engine = self.engine(seen)
        answers = Answers()
        for requests in rounds:
            answers.tokens.update({r.id: [] for r in requests})
            _serve(engine, list(requests), gap, cancel, answers)
        answers.preemptions = engine.stats().preemptions
        _collect(seen, answers)
        return answers


def _serve(
    engine: Engine,
    waiting: list[Request],
    gap: int,
    cancel: tuple[str, int] | None,
    answers: Answers,
) -> None:
    step = 0
    while waiting or engine.has_work:
        while waiting and (gap == 0 or step % gap == 0):
            engine.add(waiting.pop(0))
            if gap:
                break
        if cancel is not None and step == cancel[1]:
            engine.abort(cancel[0])
        for output in engine.step():
            answers.tokens[output.request_id] += output.token_ids
            answers.cached[output.request_id] = output.cached_tokens
            assert output.finish is not FinishReason.ERROR, output.error
        step += 1


def _collect(seen: list[tuple[list[tuple[str, int]], mx.array]], answers: Answers) -> None:
    """The last logits computed for each position: those that a resumed request went on with."""
    rows: dict[str, dict[int, np.ndarray]] = {}
    for work, logits in seen:
        for (id, end), row in zip(work, np.array(logits), strict=True):
            rows.setdefault(id, {})[end] = row
    for id, by_position in rows.items():
        ordered = [by_position[end] for end in sorted(by_position)]
        # A step that was launched before the host read the last token has one row too many.
        answers.logits[id] = ordered[: len(answers.tokens[id])]


def requests(
    format: KVFormat, lengths: tuple[int, ...], new: int = 24, seed: int = 0
) -> list[Request]:
    """Return greedy requests with random prompts."""
    rng = random.Random(seed)
    return [
        Request(
            f"{format.name}:{number}",
            tuple(rng.randrange(3, 250) for _ in range(length)),
            SamplingParams(temperature=0),
            max_tokens=new,
            kv_format=format,
        )
        for number, length in enumerate(lengths)
    ]


def difference(want: Answers, got: Answers, ids: list[str]) -> float:
    """Return the largest difference of any logit; infinite where tokens differ."""
    worst = 0.0
    for id in ids:
        if want.tokens[id] != got.tokens[id]:
            return float("inf")
        for a, b in zip(want.logits[id], got.logits[id], strict=True):
            worst = max(worst, float(np.abs(a - b).max()))
    return worst
