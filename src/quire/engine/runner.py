"""Carries out plans: embeddings, layers, logits rows, tokens. Owns the model and the pools."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from quire.cache.block_manager import Change
from quire.cache.disk_transfer import SpillTo, carry_out
from quire.cache.pools import Pools
from quire.cache.specs import group_layers
from quire.engine.encoder import ImageEncoder
from quire.engine.inputs import Layout, StepInputs
from quire.models.base import LanguageModel
from quire.request import TokenLogprobs
from quire.sampling.rows import History, RowSampling, Sampled
from quire.sampling.sampler import is_greedy, sample
from quire.scheduler.plan import StepPlan, Work
from quire.scheduler.scheduler import Drawn

_FIRST_LAYER = (0,)
_LONG_S = 1e-3
"""The most that tokens which are there already may wait for a step to be launched."""


@dataclass
class Launched:
    """A step whose graph is built, and perhaps running.

    Attributes:
        drawn: by request id, the row of `sampled` that belongs to it.
        reads_images: whether an encoder is part of it.
        first: what the first layer stores.
        roots: everything that the step must have computed when it is done.
    """

    plan: StepPlan
    work: list[Work]
    drawn: dict[str, int]
    sampled: Sampled | None
    reads_images: bool
    first: list[mx.array]
    roots: list[mx.array]

    def read(self) -> dict[str, Drawn]:
        """The tokens, on the host, by request id."""
        if self.sampled is None:
            return {}
        tokens: list[int] = np.array(self.sampled.tokens).tolist()
        logprobs = _read_logprobs(self.sampled, self.work, tokens)
        return {
            work.seq.id: Drawn(tokens[row], logprobs[row]) for row, work in enumerate(self.work)
        }


class Runner:
    """Runs steps of one model.

    Args:
        model: weights; evaluated.
        dtype: the model's.
        observe: called with each step's logits `[R, vocab]` and the work of its rows; for tests.
    """

    def __init__(
        self,
        model: LanguageModel,
        page_tokens: int,
        dtype: mx.Dtype,
        observe: Callable[[list[Work], mx.array], None] | None = None,
    ) -> None:
        self.model = model
        specs = model.layout
        self._layers = range(len(specs))
        self._launch_s = 0.0
        """How long launching the last step took."""
        self.groups = group_layers(specs)
        self.pools = Pools(self.groups, page_tokens, dtype)
        self.images = ImageEncoder(model.vision)
        self._layout = Layout.of(specs, self.groups)
        self._observe = observe
        self.spill: SpillTo | None = None
        """Takes pages that leave memory, if there is a disk tier."""

    def build(self, plan: StepPlan, epoch: int, before: Launched | None) -> Launched:
        """Builds a step's graph; nothing is computed yet, except what pools need to be moved.

        Args:
            epoch: the block manager's count of changes of page ids.
            before: the step that still runs, whose tokens may be this one's input.
        """
        self.carry_out(plan.changes)
        if plan.copies:
            self.pools.copy(plan.copies)
        if not plan.work:
            return self._launched(plan)
        drawn: Mapping[str, int] = before.drawn if before is not None else {}
        previous = before.sampled.tokens if before is not None and before.sampled else None
        inputs = StepInputs(plan, self._layout, self.pools, epoch, drawn, previous)
        inputs.media = self.images.rows(inputs.work)
        hidden = self.model(inputs)
        if not inputs.sampled:
            return self._launched(plan, inputs)
        if inputs.wanted is not None and not inputs.narrowed:
            hidden = hidden[inputs.wanted]
        logits = self.model.logits(hidden)
        if self._observe is not None:
            self._observe(inputs.sampled, logits)
        rows = [_row_sampling(work, drawn, previous) for work in inputs.sampled]
        return self._launched(plan, inputs, sample(logits, rows))

    def _launched(
        self, plan: StepPlan, inputs: StepInputs | None = None, sampled: Sampled | None = None
    ) -> Launched:
        """A step of which all is built: what it draws, and what it stores."""
        work = inputs.sampled if inputs is not None else []
        reads_images = inputs is not None and inputs.media is not None
        roots = self.pools.arrays(self._layers)
        if sampled is not None:
            drawn = (sampled.tokens, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
            roots = [part for part in drawn if part is not None] + roots
        rows = {each.seq.id: row for row, each in enumerate(work)}
        first = self.pools.arrays(_FIRST_LAYER)
        return Launched(plan, work, rows, sampled, reads_images, first, roots)

    def carry_out(self, changes: Iterable[Change]) -> None:
        """Mutates the pools: what must happen to them before a step, pages to and from the disk."""
        carry_out(changes, self.pools, self.spill)

    def begin(self, step: Launched) -> None:
        """Starts computing a step. The one before must be done, else pools would be copied:

        MLX writes into an array in place only when no pending computation still reads it.

        On a CPU MLX lets a hundred operations wait, and whoever launches more waits with them. When
        that takes long only the first layer is launched here, so that the tokens of the step before
        can go out while it runs.
        """
        waits = mx.default_device() == mx.cpu and self._launch_s > _LONG_S
        begun = time.perf_counter()
        mx.async_eval(step.first if waits else step.roots)
        self._launch_s = time.perf_counter() - begun

    def launch(self, step: Launched) -> None:
        """Starts computing what is left of a step that has begun."""
        begun = time.perf_counter()
        mx.async_eval(step.roots)
        self._launch_s += time.perf_counter() - begun

    def wait(self) -> None:
        """Returns when all that was launched is computed."""
        mx.synchronize()


def _row_sampling(work: Work, drawn: Mapping[str, int], previous: mx.array | None) -> RowSampling:
    sequence = work.seq
    params = sequence.request.sampling
    mask = sequence.mask
    if not params.needs_history:
        # A greedy row's choice depends on nothing but its logits, so one object serves all steps.
        if isinstance(sequence.sampling_row, RowSampling) and mask is None:
            return sequence.sampling_row
        row = RowSampling(params, work.end, mask=mask)
        if mask is None and is_greedy(params):
            sequence.sampling_row = row
        return row
    # The prompt never changes, and may be long.
    prompt = sequence.sampling_row
    if not isinstance(prompt, np.ndarray):
        prompt = sequence.sampling_row = np.unique(
            np.array(sequence.tokens[: sequence.prompt_length])
        )
    answer = np.array(sequence.tokens[sequence.prompt_length :])
    history = History(prompt, answer)
    pending = None
    if work.end > len(sequence.tokens) and previous is not None:
        place = drawn[sequence.id]
        pending = previous[place : place + 1]
    return RowSampling(params, work.end, history, pending, mask)


def _read_logprobs(
    sampled: Sampled, work: list[Work], tokens: list[int]
) -> list[TokenLogprobs | None]:
    if sampled.logprobs is None:
        return [None] * len(work)
    chosen = np.array(sampled.logprobs)
    ids = None if sampled.top_ids is None else np.array(sampled.top_ids)
    values = None if sampled.top_logprobs is None else np.array(sampled.top_logprobs)
    result: list[TokenLogprobs | None] = []
    for row, item in enumerate(work):
        count = item.seq.request.sampling.logprobs
        if count is None:
            result.append(None)
            continue
        top: tuple[tuple[int, float], ...] = ()
        if ids is not None and values is not None:
            pairs = zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True)
            top = tuple(pairs)
        result.append(TokenLogprobs(tokens[row], float(chosen[row]), top))
    return result
