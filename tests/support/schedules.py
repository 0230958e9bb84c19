"""Random schedules: who arrives when, how prompts are cut, who leaves, how much memory there is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.media import MediaItem
from quire.core.request import Request, SamplingParams
from quire.engine.assembly import OpenExecutor
from quire.models.weights.loader import LoadedModel
from tests.support.parity import TOLERANCE, Company, Generated, alone, with_media

_TOKENS = 10


@dataclass(frozen=True)
class Schedule:
    """A schedule of requests, drawn by a seed.

    Attributes:
        arrivals: by request, the step before which it is added.
        cancelled: by request, the step before which it is aborted.
    """

    requests: tuple[Request, ...]
    arrivals: tuple[int, ...]
    cancelled: dict[str, int]
    max_step_tokens: int
    prefix_cache: bool

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        """Return two to four requests, some of which start alike."""
        rng = random.Random(seed)
        shared = tuple(rng.randrange(3, 250) for _ in range(128))
        requests, arrivals = [], []
        for number in range(rng.randint(2, 4)):
            own = tuple(rng.randrange(3, 250) for _ in range(rng.choice((1, 7, 40, 65, 120))))
            prompt = shared[: rng.choice((0, 0, 64, 100, 128))] + own
            greedy = SamplingParams(temperature=0)
            requests.append(Request(f"r{number}", prompt, greedy, max_tokens=_TOKENS))
            arrivals.append(rng.randrange(12))
        cancelled = {each.id: rng.randrange(20) for each in requests if rng.random() < 0.2}
        return cls(
            tuple(requests),
            tuple(sorted(arrivals)),
            cancelled,
            rng.choice((9, 16, 33, 64, 2048)),
            rng.random() < 0.5,
        )

    def with_files(
        self,
        seed: int,
        items: Sequence[MediaItem],
        stands: Callable[[MediaItem], Sequence[int]],
        formats: Sequence[KVFormat],
    ) -> Schedule:
        """Return the schedule with up to three of these items, and a format, in each request.

        Most that have any start with the first item in one place, so that they share it.

        Args:
            stands: the tokens in an item's place.
        """
        rng = random.Random(seed)
        one = rng.choice(formats)
        requests = []
        for request in self.requests:
            left = len(request.prompt) - 1
            placed = []
            for number in range(rng.choice((0, 1, 1, 2, 3))):
                gap = min(left, rng.choice((0, 3, 20)) if number else 3)
                left -= gap
                first = number == 0 and rng.random() < 0.6
                placed.append((gap, items[0] if first else rng.choice(items)))
            format = one if rng.random() < 0.7 else rng.choice(formats)
            tokens = rng.choice((4, 10, 30))
            shown = with_media(request, placed, stands)
            requests.append(replace(shown, kv_format=format, max_tokens=tokens))
        return replace(self, requests=tuple(requests))

    def tight(self, loaded: LoadedModel, config: EngineConfig) -> EngineConfig:
        """Return the configuration with room for 1.25 times the largest request."""
        longest = max(256, *(len(each.prompt) + each.max_tokens for each in self.requests))
        media = [placed.item.tokens for each in self.requests for placed in each.media]
        limits = Company(loaded, config).engine._scheduler.limits
        formats = {config.kv_format, *(each.kv_format for each in self.requests)} - {None}
        least = max(
            limits.worst_case_bytes(format, longest, max(media, default=0))
            for format in formats
            if format is not None
        )
        return replace(config, kv_memory=int(least * 1.25))

    def run(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        open_executor: OpenExecutor | None = None,
    ) -> dict[str, Generated]:
        """Return each request's answer; assert that nothing holds a block at the end.

        Args:
            open_executor: see `Company`.
        """
        company = Company(
            loaded,
            replace(config, max_step_tokens=self.max_step_tokens, prefix_cache=self.prefix_cache),
            open_executor=open_executor,
        )
        step, waiting = 0, list(zip(self.arrivals, self.requests, strict=True))
        while waiting or company.engine.has_work:
            while waiting and waiting[0][0] <= step:
                company.add(waiting.pop(0)[1])
            for name, when in self.cancelled.items():
                if when == step and name in company.answers:
                    company.engine.abort(name)
            company.step()
            step += 1
        left = {name: live for name, live in company.engine.stats().kv_used if live}
        assert not left, f"blocks that nobody gave back: {left}"
        return company.answers


@dataclass(frozen=True)
class Deviation:
    """Differences between a schedule's answers and those that each request gets alone.

    Attributes:
        logits: the largest relative difference of two logits.
        tokens: requests that got other tokens.
    """

    logits: float
    tokens: int

    @property
    def within(self) -> bool:
        """Whether all differences are within the promised bounds."""
        return self.logits <= TOLERANCE and self.tokens == 0


def deviation(
    schedule: Schedule,
    loaded: LoadedModel,
    config: EngineConfig,
    open_executor: OpenExecutor | None = None,
) -> Deviation:
    """Run a schedule, and each of its requests alone.

    Args:
        open_executor: opens the schedule's executor; None opens the one that requests have alone.
    """
    expected = alone(loaded, config, list(schedule.requests))
    got = schedule.run(loaded, config, open_executor)
    worst, other = 0.0, 0
    for name, answer in got.items():
        theirs = expected[name]
        length = len(answer.tokens)
        agree = answer.tokens == theirs.tokens[:length]
        other += not agree
        worst = max([worst, *_differences(answer, theirs, agree)])
    return Deviation(worst, other)


def _differences(ours: Generated, theirs: Generated, agree: bool) -> Iterable[float]:
    """Return the differences of logits of rows that follow the same tokens."""
    for position in sorted(ours.logits.keys() & theirs.logits.keys()):
        a, b = np.array(ours.logits[position]), np.array(theirs.logits[position])
        yield float(np.abs(a - b).max() / np.abs(b).max())
        if not agree:
            return  # later rows read other tokens
