"""Runs plans: embeddings, layers, last stage. Owns the model and the pools."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from quire.attention.registry import open_backends
from quire.attention.step import Attention
from quire.cache.blocks import Change, Resize
from quire.cache.disk_transfer import SpillTo, carry_out
from quire.cache.pools import Pools
from quire.cache.specs import KVLayout
from quire.constraints.masks import TokenMask
from quire.core.kv_format import KVFormat
from quire.core.media import MediaKey
from quire.core.request import TokenLogprobs
from quire.device.device import current_device
from quire.engine.encoder_cache import EncoderCache
from quire.engine.stages import VectorStage
from quire.executor.adapters import Adapters
from quire.executor.graphs.runner import Computed, open_cuda_graphs
from quire.executor.inputs import StepInputs
from quire.models.base import CrossRows, LanguageModel
from quire.models.draft_head import Guesser
from quire.sampling.rows import RowSampling, Sampled
from quire.sampling.sampler import sample
from quire.scheduler.plan import SampledTokens, ScheduledSequence, StepPlan, StepResult

_FIRST_LAYER = (0,)
_LONG_S = 1e-3
"""Longest launch time in seconds that finished tokens may wait for."""


class SampledRow(NamedTuple):
    """A row of logits: its request, and the position of the token sampled from it."""

    id: str
    position: int


class PendingLogits(NamedTuple):
    """Logits `[R, vocab]`, and the sampling parameters of each row."""

    logits: mx.array
    rows: list[RowSampling]


@dataclass
class LaunchedStep:
    """A step whose graph is built and which may be running.

    Attributes:
        sampling: the sequences that the rows of `sampled` belong to, in order.
        row_of: the first row of `sampled` of each sequence, by sequence number.
        pending_logits: logits that wait for masks to be sampled with; None if nothing waits.
        vectors: results of vector tasks, by sequence number.
        features: bytes of the media features that it completes, by item.
        graphed: whether its layers run as a CUDA graph, whose writes to the pools MLX does not see.
        first: arrays that the first layer writes.
        to_eval: all arrays that the step has to compute.
        seconds: how long it ran, once it is done.
        hidden: `[R, hidden]` final hidden states of the sampled rows; None where a CUDA graph gives
            logits.
        guess: number of tokens that the draft head guesses after each sampled one.
        guesses: the draft head's tokens, int32 `[R, guess]`, if any are wanted.
    """

    plan: StepPlan
    sampling: list[ScheduledSequence] = field(default_factory=list)
    row_of: dict[int, int] = field(default_factory=dict)
    pending_logits: PendingLogits | None = None
    sampled: Sampled | None = None
    vectors: dict[int, mx.array] = field(default_factory=dict)
    features: Mapping[MediaKey, int] = field(default_factory=dict)
    graphed: bool = False
    first: list[mx.array] = field(default_factory=list)
    to_eval: list[mx.array] = field(default_factory=list)
    seconds: float = 0.0
    hidden: mx.array | None = None
    guess: int = 0
    guesses: mx.array | None = None

    @property
    def drawn_from(self) -> dict[int, tuple[int, int]]:
        """For each sequence by number, its first sampled row and the position of the token sampled
        there.
        """
        return {
            each.number: (self.row_of[each.number], each.end - each.sampled + 1)
            for each in self.sampling
        }


class Runner:
    """Runs steps of one model, one at a time. The next one is built while a step runs.

    MLX writes into an array in place only when no pending computation still reads it. So a step is
    launched when the previous one is done; otherwise the pools would be copied. A CUDA graph writes
    to the pools by itself, so it is launched at once, behind the running step.

    On a CPU, MLX queues at most a hundred operations, and a call that launches more blocks. If that
    takes long, only the step's first layer is launched at first, so that the previous step's tokens
    can be sent; `flush` launches the rest.

    Args:
        model: the model, with evaluated weights.
        dtype: the model's type.
        observe: called with each step's logits `[R, vocab]` and their rows; for tests.
        identity: identity of the weights; see `LoadedModel.fingerprint`.
        batch_invariant: whether a row's bits must not depend on other rows.

    Raises:
        ModelError: the device cannot run batch-invariant steps.
    """

    def __init__(
        self,
        model: LanguageModel,
        block_size: int,
        dtype: mx.Dtype,
        observe: Callable[[list[SampledRow], mx.array], None] | None = None,
        identity: str = "",
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.model = model
        specs = model.layout
        self._layers = range(len(specs))
        layout = KVLayout.of(specs)
        self.groups = layout.groups
        self.pools = Pools(self.groups, block_size, dtype)
        self.media = EncoderCache(model.encoders)
        self.spill: SpillTo | None = None
        """Takes blocks that leave memory, if there is a disk tier."""
        self._attention = Attention(layout, self.pools, open_backends())
        self._graphs = open_cuda_graphs(
            model, layout, self.pools, identity, batch_invariant=batch_invariant
        )
        self._vectors = VectorStage(model)
        self.adapters = Adapters(model)
        self.guesser: Guesser | None = None
        """Guesses tokens ahead, if the model has a head for that."""
        self._observe = observe
        self._running: LaunchedStep | None = None
        self._flushed = True
        self.started_at = 0.0
        """When the last step began to run, by `time.perf_counter`."""
        self._launch_s = 0.0
        """Seconds that launching the last step took."""

    def max_graph_rows(self, format: KVFormat) -> int:
        """Return the most rows of a step that runs as a CUDA graph; 0 without CUDA graphs."""
        return 0 if self._graphs is None else self._graphs.max_graph_rows(format)

    def graphs_serve(self, format: KVFormat) -> bool:
        """Whether steps over a format can be graphed."""
        return self._graphs is not None and self._graphs.serves_format(format)

    # -- one step after the other --------------------------------------------------------------

    def launch(self, plan: StepPlan | None, guess: int = 0) -> LaunchedStep | None:
        """Build the plan's step while another runs, wait for that one, and start the new one.

        Args:
            guess: number of tokens that the draft head guesses after each sampled one.
        """
        before, self._running = self._running, None
        resizes = plan is not None and any(isinstance(each, Resize) for each in plan.changes)
        if before is not None and resizes:
            _let_go_of_pools(before)
        step = self._build(plan, before, guess) if plan is not None else None
        started, early = self.started_at, step is not None and step.graphed
        if step is not None and early:
            self._start(step)
        if before is not None:
            # A step that follows early may run already: what this one computes is waited for.
            mx.eval(before.to_eval) if early else mx.synchronize()
            before.seconds = time.perf_counter() - started
            self.started_at = time.perf_counter()
        if step is not None and not early:
            self._start(step)
        self._running = step
        return step

    def draw(self, masks: Mapping[int, TokenMask | None]) -> None:
        """Sample the tokens of the running step, whose plan left some masks open.

        Args:
            masks: masks by sequence number. Rows that awaited a mask and have none are sampled
                without.
        """
        step = self._running
        assert step is not None
        assert step.pending_logits is not None, "no step waits for masks"
        logits, rows = step.pending_logits
        step.pending_logits = None
        for each in step.sampling:
            if (mask := masks.get(each.number)) is not None:
                place = step.row_of[each.number]
                rows[place] = replace(rows[place], mask=mask)
        drawn = _drawn(step, logits, rows, self.guesser)
        if self._flushed:
            mx.async_eval(drawn)

    def flush(self) -> None:
        """Launch the rest of the running step."""
        if self._flushed or self._running is None:
            return
        self._flushed = True
        started = time.perf_counter()
        mx.async_eval(self._running.to_eval)
        self._launch_s += time.perf_counter() - started

    def collect(self, step: LaunchedStep) -> StepResult:
        """Read the results of a finished step on the host."""
        vectors = {
            number: tuple(np.array(vector, dtype=np.float32).tolist())
            for number, vector in step.vectors.items()
        }
        tokens = {} if step.sampled is None else _tokens(step, step.sampled)
        return StepResult(tokens, vectors, step.features)

    def wait(self) -> None:
        """Wait until all launched work is computed."""
        mx.synchronize()

    def rehearse(self) -> None:
        """Run the copies that shared prefixes need, to load their kernels."""
        self.pools.rehearse()
        mx.eval(self.pools.arrays(self._layers))

    def clear(self) -> None:
        """Drop the results of a failed step, and everything cached."""
        self._running = None
        self.pools.clear()
        self.media.clear()
        self._vectors.clear()

    def carry_out(self, changes: Iterable[Change]) -> None:
        """Apply a plan's changes to the pools, including transfers from and to disk."""
        carry_out(changes, self.pools, self.spill)

    def _start(self, step: LaunchedStep) -> None:
        waits = self._holds_back()
        self._flushed = not waits
        self.started_at = time.perf_counter()
        mx.async_eval(step.first if waits else step.to_eval)
        self._launch_s = time.perf_counter() - self.started_at

    def _holds_back(self) -> bool:
        """Return whether to launch only a step's first layer now, and the rest by `flush`."""
        return current_device().begins_with_first_layer and self._launch_s > _LONG_S

    # -- the graph of a step -------------------------------------------------------------------

    def _build(self, plan: StepPlan, before: LaunchedStep | None, guess: int) -> LaunchedStep:
        """Build a step's graph. Only moves of pools are computed already.

        Args:
            before: the running step, whose tokens may be this one's input.
        """
        self.carry_out(plan.changes)
        self._vectors.forget(plan.ended)
        if plan.copies:
            self.pools.copy((copy.pool, copy.source, copy.target) for copy in plan.copies)
        step = LaunchedStep(plan, guess=guess)
        self.media.forget(plan.forgotten)
        step.to_eval += self.media.advance(plan.encoding)
        step.features = self.media.sizes(plan.encoding)
        if plan.sequences:
            row_of: Mapping[int, int] = before.row_of if before is not None else {}
            previous = before.sampled.tokens if before is not None and before.sampled else None
            inputs = StepInputs(plan, self._attention, row_of, previous)
            inputs.media = self.media.rows(inputs.sequences)
            inputs.cross = self._cross(inputs)
            computed = self._computed(inputs)
            step.graphed = computed.graphed
            if computed.graphed:
                step.to_eval.append(computed.rows)  # also where nobody reads them: it writes keys
            if inputs.ending:
                if inputs.wanted is not None and not inputs.narrowed:
                    computed = computed._replace(rows=computed.rows[inputs.wanted])
                self._finish(step, inputs.ending, computed, row_of, previous)
        step.first = self.pools.arrays(_FIRST_LAYER)
        step.to_eval += self.pools.arrays(self._layers)
        return step

    def _cross(self, inputs: StepInputs) -> CrossRows | None:
        attending = inputs.attending()
        if attending is None:
            return None
        states = self.media.cross_states(inputs.sequences, self.pools.block_size)
        return CrossRows(None if attending.all() else mx.array(attending[:, None]), states)

    def _computed(self, inputs: StepInputs) -> Computed:
        """Run the step as a CUDA graph if possible. Steps with adapters, and all others, run
        eagerly.
        """
        adapted = self.adapters.operations(inputs.sequences, inputs.wanted_rows)
        if adapted is not None:
            with current_device().computing_by(adapted):
                return Computed(self.model(inputs), logits=False, graphed=False)
        if self._graphs is not None:
            found = self._graphs.compute(inputs, lambda: self.model(inputs))
            if found is not None:
                return found
        return Computed(self.model(inputs), logits=False, graphed=False)

    def _finish(
        self,
        step: LaunchedStep,
        ending: list[ScheduledSequence],
        computed: Computed,
        row_of: Mapping[int, int],
        previous: mx.array | None,
    ) -> None:
        """Run each task's last stage on `computed`, the sequences' wanted rows in order."""
        rows: list[int] = []
        first = 0
        for each in ending:
            wanted = range(first, first + each.wanted)
            first = wanted.stop
            if each.sampled:
                step.row_of[each.number] = len(rows)
                step.sampling.append(each)
                rows += wanted
            else:
                vector = self._vectors.vector(each, computed.rows[wanted.start : wanted.stop])
                if vector is not None:
                    step.vectors[each.number] = vector
        step.to_eval += [*step.vectors.values(), *self._vectors.sums]
        if rows:
            own = computed.rows if len(rows) == first else computed.rows[mx.array(rows)]
            step.hidden = None if computed.logits else own
            logits = own if computed.logits else self.model.logits(own)
            self._sample(step, logits, row_of, previous)

    def _sample(
        self,
        step: LaunchedStep,
        logits: mx.array,
        row_of: Mapping[int, int],
        previous: mx.array | None,
    ) -> None:
        if self._observe is not None:
            if step.graphed:  # they are read after the next step was computed
                logits = logits + 0
                step.to_eval.append(logits)
            self._observe([row for each in step.sampling for row in _rows_of(each)], logits)
        rows: list[RowSampling] = []
        for each in step.sampling:
            rows += each.sampling
            unread = len(each.tokens) < each.count
            if unread and previous is not None and each.sampling[-1].history is not None:
                place = row_of[each.number]
                rows[-1] = replace(rows[-1], pending=previous[place : place + 1])
        if step.plan.awaits_masks:
            step.pending_logits = PendingLogits(logits, rows)
            step.to_eval.insert(0, logits)
        else:
            _drawn(step, logits, rows, self.guesser)


def _let_go_of_pools(step: LaunchedStep) -> None:
    """Wait for a running step, then drop its references to the pools' arrays.

    A pool is resized by copying it array by array, and an old array is freed only if nothing
    references it.
    """
    mx.eval(step.to_eval)
    step.to_eval.clear()
    step.first.clear()


def _drawn(
    step: LaunchedStep, logits: mx.array, rows: list[RowSampling], guesser: Guesser | None
) -> list[mx.array]:
    """Sample the tokens, run the draft head, and put both first in the step's `to_eval`."""
    step.sampled = sampled = sample(logits, rows)
    if step.guess and guesser is not None and step.hidden is not None:
        step.guesses = guesser(step.hidden, sampled.tokens, step.guess)
    parts = (
        *(sampled.tokens, sampled.logprobs, sampled.top_ids, sampled.top_logprobs),
        step.guesses,
    )
    drawn = [part for part in parts if part is not None]
    step.to_eval = drawn + step.to_eval
    return drawn


def _rows_of(each: ScheduledSequence) -> list[SampledRow]:
    """Return the sampled rows of a sequence."""
    return [
        SampledRow(each.id, position)
        for position in range(each.end - each.sampled + 1, each.end + 1)
    ]


def _tokens(step: LaunchedStep, sampled: Sampled) -> dict[int, SampledTokens]:
    """Return the sampled tokens, by sequence number."""
    tokens: list[int] = np.array(sampled.tokens).tolist()
    chosen = None if sampled.logprobs is None else np.array(sampled.logprobs)
    ids = None if sampled.top_ids is None else np.array(sampled.top_ids)
    values = None if sampled.top_logprobs is None else np.array(sampled.top_logprobs)
    result = {}
    for each in step.sampling:
        first = step.row_of[each.number]
        rows = range(first, first + each.sampled)
        logprobs: list[TokenLogprobs] = []
        count = each.sampling[0].params.logprobs
        for row in rows if count is not None else ():
            assert chosen is not None, "a row wants logprobs, and none were computed"
            top: tuple[tuple[int, float], ...] = ()
            if ids is not None and values is not None:
                pairs = zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True)
                top = tuple(pairs)
            logprobs.append(TokenLogprobs(tokens[row], float(chosen[row]), top))
        result[each.number] = SampledTokens(tuple(tokens[first : rows.stop]), tuple(logprobs))
    return result
