"""Streams on a device whose step times are given: speculation's gain without a clock."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import mlx.core as mx

from quire.cache.block_manager import BlockManager
from quire.cache.specs import FullKV, group_layers
from quire.core.kv_format import KVFormat
from quire.core.request import Request
from quire.device.host_copy import HostCopy
from quire.executor.following import Kept, resolved
from quire.scheduler.admission import SchedulerConfig
from quire.scheduler.draft_lengths import WorthwhileDrafts
from quire.scheduler.drafting import Drafting
from quire.scheduler.drafts import Draft, DraftQuery, LookupDrafter
from quire.scheduler.plan import GraphRows, SampledTokens, StepPlan, StepResult
from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import SequenceParts

HostSeconds = Callable[[int, int], float]
"""Seconds in which the host plans and launches a step, by its sequences and its rows."""


class Oracle(LookupDrafter):
    """Guesses each token rightly with a probability that may depend on the request.

    Args:
        rates: probability of a right guess, by the request's number.
    """

    name = "oracle"
    looks_ahead = True

    def __init__(self, rates: Callable[[int], float]) -> None:
        self._rates = rates
        self._dice: dict[int, list[float]] = {}

    def draft(self, query: DraftQuery) -> Draft:
        positions = range(len(query.tokens), len(query.tokens) + query.limit)
        return Draft(tuple(self._guess(query, each) for each in positions), self.name)

    def _guess(self, query: DraftQuery, position: int) -> int:
        name = int(query.request.id)
        if (known := self._dice.get(name)) is None:
            numbers = random.Random(name)
            known = self._dice[name] = [numbers.random() for _ in range(4096)]
        return token(position) + (known[position] >= self._rates(name))


def token(position: int) -> int:
    """Return the token at a position of every answer."""
    return 2 * (position % 50)


@dataclass
class TimedStreams:
    """A scheduler, and a device that takes the given time for each step.

    As in `Engine.step`, the host plans a step while the one before runs, unless drafts need that
    one's tokens.

    Attributes:
        step_s: seconds of a step by its rows; linear between the given numbers.
        host_s: seconds that planning and launching a step takes.
        prompts_s: the most seconds for the prompts of a step.
        key_s: seconds that each key before a prompt's chunk adds, for each row of the chunk.
        follows: whether steps are planned although it is not read which drafts of the running one
            are right.
        steps, drafted: number of steps, and of those with drafts.
    """

    step_s: Mapping[int, float]
    host_s: HostSeconds
    oracle: Oracle | None
    prompts_s: float = 1.0
    key_s: float = 0.0
    follows: bool = False
    time: float = 0.0
    steps: int = 0
    drafted: int = 0
    tokens: int = 0
    _free_at: float = 0.0
    _before: tuple[StepPlan, StepResult] | None = field(default=None)

    def __post_init__(self) -> None:
        self.budget = PrefillBudget(self.prompts_s, 2.0, 2048)
        for rows in self.step_s:
            self.budget.observe(rows, 0, 0, self.step_s[rows])
        self.lengths = WorthwhileDrafts(self.budget.times.sampling)
        drafters = () if self.oracle is None else (self.oracle,)
        self.scheduler = Scheduler(
            SchedulerConfig(64, 512, 1 << 16),
            group_layers((FullKV(1, 1),)),
            BlockManager(1 << 20, lambda key: 1),
            self.budget,
            lambda format, salt: salt.encode(),
            graph_rows=lambda format, media: GraphRows(2048),
            drafting=Drafting(
                drafters,
                self.lengths,
                1 << 20,
                clock=lambda: self.time,
                most_following=self.follows << 20,
            ),
        )

    def seconds(self, plan: StepPlan) -> float:
        """Return the time of a step."""
        rows_s = self._rows_s(plan.decode_rows + plan.prompt_rows)
        return rows_s + self.key_s * plan.prompt_keys

    def _rows_s(self, rows: int) -> float:
        known = sorted(self.step_s)
        place = min(max(1, bisect_left(known, rows)), len(known) - 1)
        low, high = known[place - 1], known[place]
        slope = (self.step_s[high] - self.step_s[low]) / (high - low)
        return self.step_s[low] + slope * (rows - low)

    def add(self, request: Request) -> None:
        drafters = frozenset() if self.oracle is None else frozenset({self.oracle.name})
        self.scheduler.add(request, KVFormat(), SequenceParts(drafters=drafters))

    def serve(self, streams: int, tokens: int, first: int = 0) -> float:
        """Serve streams to their ends; return the tokens per second while all of them generate."""
        for number in range(first, first + streams):
            self.add(Request(str(number), (0,), max_tokens=tokens))
        seconds = made = 0.0
        whole = False
        while self.scheduler.has_work or self._before is not None:
            begun, before = self.time, self.tokens
            whole_before = whole
            ended = self.step()
            if whole_before and not ended:
                seconds += self.time - begun
                made += self.tokens - before
            started = sum(each.progress.generated > 0 for each in self.scheduler.running)
            whole = started == streams
        return made / seconds

    def step(self) -> bool:
        """Return whether a stream ended."""
        scheduler = self.scheduler
        outputs = []
        early = self._before is not None and scheduler.drafting.wants_tokens(scheduler.running)
        if early:
            assert self._before is not None
            self.time = max(self.time, self._free_at)
            scheduler.update(*self._before)
            outputs += scheduler.take_outputs()
            self._before = None
        plan = scheduler.schedule()
        following = None
        if plan is not None:
            plan = self._placed(plan)
            rows = plan.decode_rows + plan.prompt_rows
            host_s = self.host_s(len(plan.sequences), rows)
            self.time += host_s
            if early or plan.follows:
                waited = max(0.0, self.time - self._free_at)
                self.lengths.observe_wait(waited, plan.generating, read=early)
            seconds = self.seconds(plan)
            done_before, self._free_at = (
                self._free_at,
                max(self.time, self._free_at) + seconds,
            )
            following = plan, StepResult(self._sampled(plan), seconds=seconds)
            shape = plan.decode_rows, plan.prompt_chunks, plan.prompt_rows
            self.budget.observe(*shape, seconds, keys=plan.prompt_keys, graphed=True)
            self.steps += 1
            self.drafted += any(each.sampled > 1 for each in plan.sequences)
        else:
            done_before = self._free_at
        if self._before is not None:
            self.time = max(self.time, done_before)
            scheduler.update(*self._before)
            outputs += scheduler.take_outputs()
        self._before = following
        self.tokens += sum(len(output.token_ids) for output in outputs)
        return any(output.finish is not None for output in outputs)

    def _placed(self, plan: StepPlan) -> StepPlan:
        """Return a plan with the places and tokens of rows that follow the step before."""
        if not plan.follows:
            return plan
        assert self._before is not None, "rows follow a step"
        before, result = self._before
        tokens, lasts, places = list[int](), list[int](), dict[int, int]()
        for each in before.sequences:
            if own := result.tokens.get(each.number):
                tokens += own.tokens
                lasts.append(len(tokens) - 1)
                places[each.number] = len(places)
        known = Kept(HostCopy(mx.array(tokens)), None, None, lasts, places)
        return replace(resolved(plan, known), follows=True)

    def _sampled(self, plan: StepPlan) -> dict[int, SampledTokens]:
        return {
            each.number: SampledTokens(
                tuple(token(each.end + 1 - each.sampled + n) for n in range(each.sampled))
            )
            for each in plan.sequences
            if each.sampled
        }
