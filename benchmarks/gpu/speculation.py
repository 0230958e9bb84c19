"""Speculation with an imposed acceptance on a random model: `speculation.py FOLDER OUT`.

Answers are drawn beforehand, and each sampled token is replaced by the answer's own: greedy tokens
of random weights change with the number of rows of a step. So rows meet as many different experts
as random tokens do. A drafter that knows the answers guesses the share `--rate` of their tokens
rightly. Bursts with speculation off and on take turns on one engine; the lengths of
drafts follow from measured step times, as in a server. `waited` is the same as `auto`, but that
steps which follow drafts are built once the host has read these.

The first table is what a step costs by its number of rows: streams with a fixed number of drafts,
all of them wrong. A step `ran` from its launch until its tokens arrived; then the card `waits` for
the next one's launch. `parts` are what the host does meanwhile, and later, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from workload import drawn

from quire.core.config import EngineConfig
from quire.core.processes import freeze_heap
from quire.core.request import Request, SamplingParams
from quire.device.device import current_device, open_device
from quire.device.private import use_private_cache
from quire.engine.assembly import OpenExecutor, assemble
from quire.engine.engine import Engine
from quire.engine.warm_up import measure_steps, warm_up
from quire.executor import eager
from quire.executor.factory import SharedGraphs, open_executor
from quire.models.weights.loader import LoadedModel, open_model
from quire.sampling import history
from quire.sampling.rows import Moved, RowSampling, Sampled
from quire.sampling.sampler import sample
from quire.scheduler.draft_lengths import Candidate, EveryDraft
from quire.scheduler.drafts import Draft, DraftQuery, LookupDrafter
from quire.scheduler.plan import StepPlan, StepResult

_SETTINGS = {"MLX_ENABLE_TF32": "0", "MLX_USE_CUDA_GRAPHS": "0"}
"""Variables that `quire serve` sets for its engine. MLX reads them when it is imported."""
_PROMPT = 128
_MODES = ("off", "waited", "auto")
_FIXED = ((1, 0), (1, 1), (1, 3), (1, 5), (1, 7), (8, 0), (8, 1), (8, 2), (8, 3))
"""Numbers of streams, and of drafts for each, whose steps are timed."""
_FIXED_TOKENS = 48
"""Number of answer tokens of each of these streams."""


class Answers:
    """Answers that were drawn before they are generated, by the seed of their requests."""

    def __init__(self, tokens: int, vocab_size: int) -> None:
        self._tokens, self._vocab_size = tokens, vocab_size
        self._drawn: dict[int, list[int]] = {}

    def answer(self, seed: int) -> list[int]:
        """Return the tokens of an answer."""
        if seed not in self._drawn:
            numbers = random.Random(seed)
            self._drawn[seed] = [
                numbers.randrange(10, self._vocab_size) for _ in range(self._tokens)
            ]
        return self._drawn[seed]

    def sampled(
        self, logits: mx.array, rows: list[RowSampling], moved: Moved | None = None
    ) -> Sampled:
        """Sample as the engine does, then replace the tokens by those of the answers."""
        own = sample(logits, rows, moved=moved)
        most = 0 if moved is None else max(moved.most)
        wanted = mx.array(
            [self._token(row, row.position - n) for row in rows for n in range(most + 1)],
            dtype=mx.int32,
        )
        if moved is not None:
            firsts = mx.arange(0, len(wanted), most + 1, dtype=mx.int32)
            wanted = wanted[firsts + moved.rows]
        return own._replace(tokens=mx.minimum(own.tokens, 0) + wanted)

    def _token(self, row: RowSampling, position: int) -> int:
        """Return the answer's token at a position; 0 where the row has none."""
        seed, place = row.params.seed, position - _PROMPT
        return self.answer(seed)[place] if seed is not None and 0 <= place < self._tokens else 0


class Parts:
    """Times of the parts of a step in which the host works, in microseconds."""

    def __init__(self, engine: Engine) -> None:
        self._seconds: dict[str, list[float]] = {}
        executor, scheduler = engine._executor, engine._scheduler
        for owner, name in (
            (executor, "collect"),
            (scheduler, "update"),
            (scheduler, "schedule"),
            (executor, "_build"),
            (executor, "_run"),
            (executor, "_finish"),
            (executor, "_start"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), name.strip("_")))
        update, observe = scheduler.update, engine._worthwhile.observe_wait

        def updated(plan: StepPlan, result: StepResult) -> Any:
            self._seconds.setdefault("ran", []).append(result.seconds)
            return update(plan, result)

        def waited(seconds: float, rows: int, *, read: bool = True) -> None:
            self._seconds.setdefault("waits", []).append(seconds)
            observe(seconds, rows, read=read)

        scheduler.update, engine._worthwhile.observe_wait = updated, waited  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                self._seconds.setdefault(name, []).append(time.perf_counter() - begun)

        return timed

    def taken(self) -> dict[str, int]:
        """Return the medians since the last call."""
        found = {name: round(statistics.median(s) * 1e6) for name, s in self._seconds.items()}
        self._seconds.clear()
        return found


class FixedDrafts(EveryDraft):
    """Verifies a fixed number of drafts of each sequence; a measurement changes it."""

    most = 0

    def choose(
        self,
        candidates: Sequence[Candidate],
        rows: int,
        *,
        beginning: bool = False,
        ahead: int = 0,
    ) -> list[int]:
        return [min(each.most, self.most) for each in candidates]


class Oracle(LookupDrafter):
    """Guesses a given share of each answer's tokens rightly, at places drawn by its seed.

    Args:
        rate: share of right guesses in each answer.
        most: most guesses in a step; a measurement changes it.
    """

    name = "scripted"
    looks_ahead = True

    def __init__(self, answers: Answers, rate: float, most: int = 16) -> None:
        self.most, self._answers, self._rate = most, answers, rate
        self._guesses: dict[int, list[int]] = {}

    def draft(self, query: DraftQuery) -> Draft | None:
        seed = query.request.sampling.seed
        if seed is None:
            return None
        if seed not in self._guesses:
            # The same position is right or wrong however often it is guessed. The share of right
            # ones is exact: of 150 tokens drawn one by one it would differ by 0.04.
            answer = self._answers.answer(seed)
            right = [n < self._rate * len(answer) for n in range(len(answer))]
            random.Random(seed << 8 | 1).shuffle(right)
            self._guesses[seed] = [
                token if hit else token + (-1 if token > 10 else 1)
                for token, hit in zip(answer, right, strict=True)
            ]
        begin = len(query.tokens) - len(query.request.prompt)
        tokens = self._guesses[seed][begin : begin + min(query.limit, self.most)]
        return Draft(tuple(tokens), self.name) if tokens else None


def burst(
    engine: Engine, streams: int, tokens: int, name: str, seed: int, mode: Any
) -> dict[str, Any]:
    """Serve streams to their ends. Rates are those while all of them generate."""
    before = engine.stats()
    for number in range(streams):
        sampling = SamplingParams(temperature=0.0, seed=seed + number)
        prompt = drawn(_PROMPT, seed + number)
        asked = Request(f"{name} {number}", prompt, sampling, max_tokens=tokens, speculation=mode)
        engine.add(asked)
    counts: dict[str, int] = {}
    steps: list[tuple[float, int]] = []
    ended = False
    last = time.perf_counter()
    while engine.has_work:
        whole = len(counts) == streams and not ended
        outputs = engine.step()
        now = time.perf_counter()
        made = 0
        for output in outputs:
            if output.error is not None:
                raise SystemExit(f"{name}: {output.error.message}")
            if output.token_ids:
                counts[output.request_id] = counts.get(output.request_id, 0) + len(output.token_ids)
                made += len(output.token_ids)
            ended = ended or output.finish is not None
        if whole and not ended:
            steps.append((now - last, made))
        last = now
    after = engine.stats()
    drafted = sum(dict(after.drafts).values()) - sum(dict(before.drafts).values())
    accepted = sum(dict(after.accepted_drafts).values()) - sum(
        dict(before.accepted_drafts).values()
    )
    result = {
        "streams": streams,
        "speculation": mode,
        "steps": after.steps - before.steps,
        "drafts a step": round(drafted / (after.steps - before.steps), 2),
        "accepted": round(accepted / drafted, 3) if drafted else None,
    }
    if not steps:  # the first stream ended before the last one began
        return result
    seconds, made = (sum(column) for column in zip(*steps, strict=True))
    return result | {
        "tokens/s": round(made / seconds, 1),
        "median step, ms": round(statistics.median(each for each, _ in steps) * 1e3, 3),
        "tokens a step and stream": round(made / len(steps) / streams, 2),
    }


def launching_ahead(engine: Engine, ahead: bool) -> None:
    """Let steps that follow drafts be launched behind the running one, or only once it is read."""
    executor: Any = engine._executor
    executor._follows = executor._places if ahead else lambda plan: False


def step_costs(
    loaded: LoadedModel,
    config: EngineConfig,
    answers: Answers,
    open_executor: OpenExecutor,
    *,
    ahead: bool,
) -> list[dict[str, Any]]:
    """Return what a step costs by the numbers of streams and of drafts, all of them wrong.

    Args:
        ahead: see `launching_ahead`.
    """
    drafter, lengths = Oracle(answers, rate=0.0), FixedDrafts()
    engine = assemble(
        loaded,
        config,
        drafters=(drafter,),
        draft_lengths=lengths,
        open_executor=open_executor,
    )
    launching_ahead(engine, ahead)
    parts = Parts(engine)
    rows: list[dict[str, Any]] = []
    for again in range(2):  # the first time graphs are recorded
        rows = []
        for streams, drafts in _FIXED:
            # Those of the step before, too, and the token that it ends with: it may still run.
            drafter.most, lengths.most = 2 * drafts + 1, drafts
            mode = "auto" if drafts else "off"
            seed = 9000 + 1000 * streams + 100 * drafts + again
            parts.taken()
            row = burst(engine, streams, _FIXED_TOKENS, f"{streams} x {drafts} {again}", seed, mode)
            taken = parts.taken()
            rows.append(
                {"streams": streams, "rows": streams * (drafts + 1)}
                | {"step, us": round(row["median step, ms"] * 1e3)}
                | {name: taken.pop(name, None) for name in ("ran", "waits")}
                | {"parts": taken}
            )
    return rows


def _case(row: dict[str, Any]) -> tuple[int, str]:
    return row["streams"], row["speculation"]


def main(asked: argparse.Namespace) -> None:
    begun = time.perf_counter()
    use_private_cache()
    config = EngineConfig(
        asked.folder,
        kv_memory=asked.kv_gigabytes << 30,
        max_sequences=max(asked.streams),
        prefix_cache=False,
    )
    open_device(config.blas, config.kernels, config.threads)
    loaded = open_model(asked.folder)
    graphs = SharedGraphs()  # as in a server: the engine that serves records none again
    open_shared = partial(open_executor, graphs=graphs)
    if current_device().compiles:
        warm_up(loaded, config, open_executor=open_shared)
        graphs.release()
    times = measure_steps(loaded, config, open_shared)
    graphs.release()
    answers = Answers(asked.tokens, loaded.model.vocab_size)
    eager.sample = answers.sampled  # type: ignore[attr-defined,assignment]
    # Rows of greedy requests then say which position they are of.
    history.is_greedy = lambda params: False  # type: ignore[attr-defined]
    result: dict[str, Any] = {
        "model": Path(asked.folder).name,
        "device": current_device().name,
        "rate": asked.rate,
        "opened, s": round(time.perf_counter() - begun, 1),
    }
    rows: list[dict[str, Any]] = []

    def note(**more: Any) -> None:
        result.update(more, seconds=round(time.perf_counter() - begun, 1))
        asked.out.write_text(json.dumps(result, indent=1))

    freeze_heap()  # as the engine's process does
    for ahead in asked.costs:
        costs = step_costs(loaded, config, answers, open_shared, ahead=ahead == "ahead")
        graphs.release()
        note(**{f"costs, {ahead}": costs})
        for row in costs:
            print(json.dumps({"launched": ahead} | row), flush=True)
    drafter = Oracle(answers, asked.rate)
    engine = assemble(
        loaded, config, drafters=(drafter,), step_times=times, open_executor=open_shared
    )
    for again in range(asked.rounds):
        for streams in asked.streams:
            for mode in _MODES:
                launching_ahead(engine, mode != "waited")
                name = f"round {again}, {streams} streams, {mode}"
                seed, spoken = 1000 * again + 100 * streams, "off" if mode == "off" else "auto"
                row = burst(engine, streams, asked.tokens, name, seed, spoken)
                row["speculation"] = mode
                print(json.dumps({"round": again} | row), flush=True)
                rows.append({"round": again} | row)
                note(rows=rows)
    lines = []
    for streams in asked.streams:
        off, waited, on = (
            max(row.get("tokens/s", 0.0) for row in rows if _case(row) == (streams, mode))
            for mode in _MODES
        )
        line = {"streams": streams, "off": off, "waited": waited, "on": on}
        lines.append(line | {"times": off and round(on / off, 2)})
        print(json.dumps(lines[-1]), flush=True)
    note(lines=lines)


if __name__ == "__main__":
    if not _SETTINGS.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**_SETTINGS, **os.environ})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rate", type=float, default=0.7, help="share of right guesses")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--costs", nargs="*", default=["waited", "ahead"], help="steps to time")
    parser.add_argument("--kv-gigabytes", type=int, default=8)
    main(parser.parse_args())
