"""Runs requests through an engine in many kinds of company and compares each with itself alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.media import MediaItem, PlacedMedia
from quire.core.request import FinishReason, Output, Request, SamplingParams, TokenLogprobs
from quire.engine.assembly import OpenExecutor, assemble
from quire.engine.engine import Engine
from quire.executor.eager import EagerExecutor
from quire.executor.factory import open_executor
from quire.executor.guessing import Guesser
from quire.executor.step import SampledRow
from quire.models.weights.loader import LoadedModel, open_model
from quire.scheduler.draft_lengths import DraftLengths
from quire.scheduler.drafts import Drafter
from tests.support.tiny_models import write_model

TOLERANCE = 1e-4
"""The most that two logits of one row may differ, relative to the largest of the row."""

LENGTHS = (1, 5, 40, 64, 65, 130)
"""Prompts shorter than a page, of a page, past it, past the tiny models' window of 32."""


@dataclass
class Generated:
    """The answer to a request: tokens, the logits of each, log-probabilities, finish reason."""

    tokens: list[int] = field(default_factory=list)
    logits: dict[int, mx.array] = field(default_factory=dict)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ends: list[Output] = field(default_factory=list)


def executor_of(engine: Engine) -> EagerExecutor:
    """Return the executor of an engine, whose parts a test looks at."""
    assert isinstance(engine._executor, EagerExecutor)
    return engine._executor


class Company:
    """An engine, and what each request got from it.

    Attributes:
        usual_executor: opens the executor if none is given; tests of split models set it.
    """

    usual_executor: ClassVar[OpenExecutor] = open_executor

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        drafters: Sequence[Drafter] = (),
        draft_lengths: DraftLengths | None = None,
        guesser: Guesser | None = None,
        open_executor: OpenExecutor | None = None,
    ) -> None:
        # No clock decides how prompts are cut: only `max_step_tokens` does.
        untimed = replace(config, step_ms=1e6, stall_factor=1e6)
        self.engine = assemble(
            loaded,
            untimed,
            self._observe,
            drafters,
            draft_lengths,
            guesser=guesser,
            open_executor=open_executor or type(self).usual_executor,
        )
        self.answers: dict[str, Generated] = {}

    def _observe(self, rows: list[SampledRow], logits: mx.array) -> None:
        for number, row in enumerate(rows):
            self.answers[row.id].logits[row.position] = logits[number]

    def add(self, request: Request) -> None:
        self.answers[request.id] = Generated()
        self.engine.add(request)

    def step(self) -> None:
        for output in self.engine.step():
            answer = self.answers[output.request_id]
            assert not answer.ends, f"{output.request_id} went on after its end"
            answer.tokens += output.token_ids
            answer.logprobs += output.logprobs
            if output.finish is not None:
                answer.ends.append(output)

    def run(self, requests: Iterable[Request], every: int = 0) -> dict[str, Generated]:
        """Serves requests, all at once or one more every so many steps."""
        waiting = list(requests)
        steps = 0
        while waiting or self.engine.has_work:
            while waiting and (every == 0 or steps % every == 0):
                self.add(waiting.pop(0))
                if every:
                    break
            self.step()
            steps += 1
        return self.answers


def with_media(
    request: Request,
    items: Iterable[tuple[int, MediaItem]],
    stands: Callable[[MediaItem], Sequence[int]],
) -> Request:
    """Return the request with media among its tokens.

    Args:
        items: each with the number of tokens of text before it.
        stands: the tokens in an item's place.
    """
    tokens: list[int] = []
    text = list(request.prompt)
    placed = []
    for gap, item in items:
        tokens += text[:gap]
        del text[:gap]
        placed.append(PlacedMedia(len(tokens), item))
        tokens += stands(item)
    return replace(request, prompt=(*tokens, *text), media=tuple(placed))


def prompts(lengths: Iterable[int] = LENGTHS, tokens: int = 28, seed: int = 0) -> list[Request]:
    """Return greedy requests with unrelated prompts of the given lengths.

    Of `LENGTHS` answers of 28 tokens go past a page (from 40), and past the window (from 5). The
    second one's least length makes its tokens wait for masks.
    """
    rng = random.Random(seed)
    return [
        Request(
            f"r{number}",
            tuple(rng.randrange(3, 250) for _ in range(length)),
            SamplingParams(temperature=0),
            max_tokens=tokens,
            min_tokens=tokens if number == 1 else 0,
        )
        for number, length in enumerate(lengths)
    ]


def alone(
    loaded: LoadedModel, config: EngineConfig, requests: list[Request]
) -> dict[str, Generated]:
    """Serve each request in an engine of its own, its prompt read in one piece."""
    config = replace(config, prefix_cache=False)
    answers: dict[str, Generated] = {}
    for request in requests:
        answers |= Company(loaded, config).run([request])
    return answers


def answered(
    loaded: LoadedModel,
    tokens: Sequence[int],
    media: Sequence[PlacedMedia],
    count: int,
    max_step_tokens: int = 7,
    never: Iterable[int] = (),
) -> Generated:
    """Return what one prompt with its media gets, read so many tokens a step, none of them of
    `never`.
    """
    (request,) = prompts([1], tokens=count)
    sampling = replace(request.sampling, logit_bias=tuple((token, -100.0) for token in never))
    asked = replace(request, prompt=tuple(tokens), media=tuple(media), sampling=sampling)
    config = EngineConfig(
        "", kv_memory=16 << 20, prefix_cache=False, max_step_tokens=max_step_tokens
    )
    return Company(loaded, config).run([asked])[request.id]


def count_encodes(
    loaded: LoadedModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, ...]]:
    """Return the shapes of a kind's items, one for each time that an item is encoded from now
    on.
    """
    shapes: list[tuple[int, ...]] = []
    encoder = type(loaded.model.encoders[kind])
    encode = encoder.encode

    def counted(self: Any, features: Any, shape: tuple[int, ...]) -> Any:
        shapes.append(shape)
        return encode(self, features, shape)

    monkeypatch.setattr(encoder, "encode", counted)
    return shapes


def assert_same(
    got: dict[str, Generated],
    expected: dict[str, Generated],
    names: Iterable[str],
    tolerance: float = TOLERANCE,
) -> None:
    """Equal tokens, logits within tolerance, one proper end each."""
    for name in names:
        ours, theirs = got[name], expected[name]
        assert ours.tokens == theirs.tokens, f"{name}: tokens differ"
        assert [end.finish for end in ours.ends] == [FinishReason.LENGTH]
        for position, logits in theirs.logits.items():
            if position not in ours.logits:
                continue
            a, b = np.array(ours.logits[position]), np.array(logits)
            error = np.abs(a - b).max() / np.abs(b).max()
            assert error < tolerance, f"{name}: logits at {position} differ by {error:.2e}"


Opened = tuple[LoadedModel, EngineConfig]
Expected = Callable[[str, KVFormat], dict[str, Generated]]


def opener(folder: Path, configs: Mapping[str, dict[str, Any]]) -> Callable[[str], Opened]:
    """Opens a family's tiny model in float32, each once, below a folder."""

    @cache
    def find(name: str) -> Opened:
        path = str(write_model(folder / name, configs[name]))
        loaded = open_model(path, dtype="float32")
        return loaded, EngineConfig(path, kv_memory=64 << 20, kv_skip_layers=())

    return find


def answers_alone(
    opened: Callable[[str], Opened], requests: Callable[[str], list[Request]]
) -> Expected:
    """Return what each of a family's requests gets alone in a KV format, computed once."""

    @cache
    def find(name: str, format: KVFormat) -> dict[str, Generated]:
        loaded, config = opened(name)
        return alone(loaded, replace(config, kv_format=format), requests(name))

    return find


Scenario = Callable[[LoadedModel, EngineConfig, list[Request]], dict[str, Generated]]


def in_batch(
    loaded: LoadedModel, config: EngineConfig, wanted: list[Request]
) -> dict[str, Generated]:
    return Company(loaded, config).run(wanted)


def staggered(
    loaded: LoadedModel, config: EngineConfig, wanted: list[Request]
) -> dict[str, Generated]:
    return Company(loaded, config).run(wanted, every=5)


def beside_cancelled(
    loaded: LoadedModel, config: EngineConfig, wanted: list[Request]
) -> dict[str, Generated]:
    """Serve requests beside neighbours that are cancelled while they generate or read a prompt."""
    company = Company(loaded, replace(config, max_step_tokens=48))
    for request in wanted[:3]:
        company.add(request)
    for number, length in enumerate((30, 400)):
        rng = random.Random(number)
        prompt = tuple(rng.randrange(3, 250) for _ in range(length))
        company.add(Request(f"gone{number}", prompt, SamplingParams(temperature=0), 200))
    for _ in range(4):
        company.step()
    company.engine.abort("gone0")
    company.engine.abort("gone1")
    company.run(wanted[3:], every=2)
    for number in range(2):
        assert [end.finish for end in company.answers[f"gone{number}"].ends] == [FinishReason.ABORT]
    return company.answers


def chunked(size: int) -> Scenario:
    def scenario(
        loaded: LoadedModel, config: EngineConfig, wanted: list[Request]
    ) -> dict[str, Generated]:
        return Company(loaded, replace(config, max_step_tokens=size)).run(wanted, every=3)

    return scenario


def preempted(
    loaded: LoadedModel, config: EngineConfig, wanted: list[Request]
) -> dict[str, Generated]:
    """Serve requests in a budget for the longest and some more: the younger ones are preempted."""
    longest = max(len(request.prompt) + request.max_tokens for request in wanted)
    stored = replace(config.kv_format, skip_layers=config.kv_skip_layers or ())
    least = assemble(loaded, config)._scheduler.limits.worst_case_bytes(stored, longest)
    return _pressed(loaded, replace(config, max_context=longest), wanted, least)


def under_pressure(
    loaded: LoadedModel, config: EngineConfig, wanted: list[Request]
) -> dict[str, Generated]:
    """Run as `preempted`, counting the largest media item into the longest request's need."""
    longest = max(len(each.prompt) + each.max_tokens for each in wanted)
    largest = max(placed.item.tokens for each in wanted for placed in each.media)
    limits = Company(loaded, config).engine._scheduler.limits
    least = limits.worst_case_bytes(config.kv_format, longest, largest)
    return _pressed(loaded, config, wanted, least)


def _pressed(
    loaded: LoadedModel, config: EngineConfig, wanted: list[Request], least: int
) -> dict[str, Generated]:
    """Return answers with the least of some budgets in which a second request starts and both
    outgrow it.

    Where tails take most of the bytes, `page` above all, little more than `least` lets no second
    one start.

    Args:
        least: the bytes that the longest request takes.
    """
    for share in (3 / 2, 7 / 4, 15 / 8):
        company = Company(loaded, replace(config, kv_memory=int(least * share)))
        company.run(wanted)
        if company.engine.stats().preemptions:
            return company.answers
    raise AssertionError("no budget was pressure")


SCENARIOS: dict[str, Scenario] = {
    "batch of unequal lengths": in_batch,
    "staggered arrivals": staggered,
    "beside a cancelled neighbour": beside_cancelled,
    "in chunks of 9": chunked(9),
    "in chunks of 33": chunked(33),
    "in chunks of 64": chunked(64),
    "pre-empted and resumed": preempted,
}
