"""Runs steps through the model's own code, on any device: the reference for other executors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import mlx.core as mx

from quire.attention.registry import open_backends
from quire.attention.step import Attention
from quire.cache.blocks import PoolKey, Resize, Restore
from quire.cache.disk_transfer import SpillTo, carry_out, matches_pool
from quire.cache.host_block import HostBlock
from quire.cache.pools import Pools
from quire.cache.specs import KVLayout
from quire.constraints.masks import TokenMask
from quire.core.kv_format import KVFormat
from quire.device.device import current_device
from quire.executor.adapters import Adapters
from quire.executor.computed import Computed
from quire.executor.contents import Contents
from quire.executor.encoder_cache import EncoderCache
from quire.executor.following import ANY_ROWS, Following, resolved
from quire.executor.guessing import FinalStates, Guesser
from quire.executor.inputs import StepInputs
from quire.executor.repeated import RepeatedSteps
from quire.executor.stages import VectorStage
from quire.executor.step import (
    Drawn,
    LaunchedStep,
    SampledRow,
    StepRows,
    Unsampled,
    sampled_rows,
)
from quire.models.base import LanguageModel
from quire.sampling.rows import RowSampling
from quire.sampling.sampler import sample
from quire.scheduler.plan import GraphRows, ScheduledSequence, StepPlan, StepResult

_FIRST_LAYER = (0,)
_LONG_S = 1e-3
"""Longest launch time in seconds that finished tokens may wait for."""

Observe = Callable[[list[SampledRow], mx.array], None]
"""Takes each step's logits `[R, vocab]` and their rows; for tests."""


class EagerExecutor:
    """Runs steps through MLX. Implements `Executor`.

    MLX writes into an array in place only when no pending computation still reads it. So a step is
    launched when the previous one is done; otherwise the pools would be copied. A CUDA graph writes
    to the pools by itself, and so do segments, so these are launched at once, behind the running
    step.

    On a CPU, MLX queues at most a hundred operations, and a call that launches more blocks. If that
    takes long, only the step's first layer is launched at first, so that the previous step's tokens
    can be sent; `flush` launches the rest.

    Where no step runs, because drafts needed its tokens, the device starts with the layers while
    the host prepares sampling.

    Args:
        model: the model, with evaluated weights.
        guesser: guesses tokens ahead, if the model has a head for that.
        spill: takes blocks that leave memory, if there is a disk tier.
        contents: holds what plans name by key; a new one by default.
        compiles: whether graphs of steps may be kept, where the device does so.
        identity: see `RepeatedSteps`.
        logits: computes `model.logits`; the model's own code by default.
        follows: returns whether a plan whose rows follow drafts of a running step can be built
            while that step runs; never by default. Where it cannot, the step is waited for.
    """

    planned_bytes = 0
    most_following = ANY_ROWS
    leaves_out = False
    """Whether rows of unlikely guesses take no time; see `StepPlan.least_chance`."""

    def __init__(
        self,
        model: LanguageModel,
        pools: Pools,
        *,
        guesser: Guesser | None = None,
        spill: SpillTo | None = None,
        observe: Observe | None = None,
        contents: Contents | None = None,
        compiles: bool = True,
        identity: str = "",
        logits: Callable[[mx.array], mx.array] | None = None,
        follows: Callable[[StepPlan], bool] = lambda plan: False,
    ) -> None:
        self.model = model
        self._logits, self._follows = logits or model.logits, follows
        self._layers = range(len(model.layout))
        self.pools, self.grows_in_place = pools, pools.grows_in_place
        self.contents = contents or Contents()
        self.media = EncoderCache(model.encoders, self.contents.features)
        self.adapters = Adapters(model)
        self._attention = Attention(KVLayout.of(model.layout), pools, open_backends())
        self._vectors = VectorStage(model)
        self._repeated = RepeatedSteps(
            model,
            pools,
            logits=self._logits,
            compiles=compiles and current_device().compiles_steps,
            identity=identity,
        )
        self._guesser, self._spill, self._observe = guesser, spill, observe
        self._guessed_layers = range(0) if guesser is None else guesser.layers
        self._running: LaunchedStep | None = None
        self._finished: tuple[LaunchedStep, float] | None = None
        """The last step that is done and not read, and how many seconds it ran."""
        self._flushed = True
        self._started_at = 0.0
        """When the last step started to run, by `time.perf_counter`."""
        self._layers_launched = False
        """Whether the layers of the step that is being built were launched."""
        self._launch_s = 0.0
        """Seconds that launching the last step took."""

    # -- facts ---------------------------------------------------------------------------------

    @property
    def work_seconds(self) -> tuple[float, ...]:
        return ()

    def block_bytes(self, pool: PoolKey) -> int:
        return self.pools.claimed_bytes(pool)

    def fits(self, pool: PoolKey, block: HostBlock) -> bool:
        return matches_pool(self.pools, pool, block)

    def serves(self, format: KVFormat) -> bool:
        return False

    def graph_rows(self, format: KVFormat, media: bool) -> GraphRows:
        return GraphRows()

    def prepare(self) -> None:
        """Run the copies that shared prefixes need, to load their kernels."""
        self.pools.rehearse()
        mx.eval(self.pools.arrays(self._layers))

    # -- one step after the other --------------------------------------------------------------

    def launch(self, plan: StepPlan | None) -> float:
        last: LaunchedStep | None = None  # where it is done
        if plan is not None and plan.follows and not self._follows(plan):
            self.launch(plan=None)
            assert self._finished is not None, "rows follow a step"
            last = self._finished[0]
            plan = resolved(plan, last.rows.kept)
        before, self._running = self._running, None
        if plan is not None and _moves_arrays(plan, self.pools):
            if before is not None:
                # An array that is copied elsewhere is freed only if nothing references it.
                mx.eval(before.to_eval)
                before = before.without_arrays()
            self._repeated.clear()
        if before is not None and not (before.rows.graphed or before.rows.in_place):
            self.pools.free_copied()
        step = None if plan is None else self._build(plan, before or last)
        started, early = self._started_at, step is not None and step.rows.early
        if step is not None and early:
            self._start(step)
        if before is not None:
            before.wait(overtaken=early)
            # The new step writes in place to arrays of the pools that nothing else references.
            self._finished = before.without_arrays(), time.perf_counter() - started
            self._started_at = time.perf_counter()
        if step is not None and not early:
            self._start(step)
        self._running = step
        return self._started_at

    def draw(self, masks: Mapping[int, TokenMask | None]) -> None:
        step = self._running
        assert step is not None, "no step runs"
        waiting = step.rows.unsampled
        assert waiting is not None, "no step waits for masks"
        rows = list(waiting.rows)
        for each in step.rows.sampling:
            if (mask := masks.get(each.number)) is not None:
                place = step.rows.row_of[each.number]
                rows[place] = rows[place]._replace(mask=mask)
        drawn = self._drawn(waiting._replace(rows=rows), step.plan.guess)
        written = self.pools.arrays(self._guessed_layers)
        if self._guesser is not None:
            written = [*written, *self._guesser.arrays]
        self._running = step.with_tokens(drawn, written)
        if self._flushed:
            mx.async_eval(drawn.arrays, written)

    def flush(self) -> None:
        if self._flushed or self._running is None:
            return
        self._flushed = True
        started = time.perf_counter()
        mx.async_eval(self._running.to_eval)
        self._launch_s += time.perf_counter() - started

    def collect(self) -> StepResult:
        assert self._finished is not None, "no step is done"
        (step, seconds), self._finished = self._finished, None
        return step.read(seconds)

    def clear(self) -> None:
        self._running = self._finished = None
        self._layers_launched = False
        self.pools.clear()
        self._repeated.fail()
        self.contents.drop_blocks()
        self.media.clear()
        self._vectors.clear()

    def _start(self, step: LaunchedStep) -> None:
        waits = self._holds_back()
        self._flushed = not waits
        started = time.perf_counter()
        if not self._layers_launched:
            self._started_at = started
        self._layers_launched = False
        mx.async_eval(self.pools.arrays(_FIRST_LAYER) if waits else step.to_eval)
        self._launch_s = time.perf_counter() - started

    def _holds_back(self) -> bool:
        """Return whether to launch only a step's first layer now, and the rest by `flush`."""
        return current_device().starts_with_first_layer and self._launch_s > _LONG_S

    # -- the arrays of a step ------------------------------------------------------------------

    def _build(self, plan: StepPlan, before: LaunchedStep | None) -> LaunchedStep:
        """Build a step's arrays. Only moves of pools are computed already.

        Args:
            before: the step before, whose tokens may be this one's input. It runs or is done.
        """
        carry_out(plan.changes, self.pools, self._spill, block=self.contents.block)
        self.contents.drop_blocks({e.name for e in plan.changes if isinstance(e, Restore)})
        self._vectors.forget(plan.ended)
        if plan.copies:
            if before is not None and not (before.rows.in_place or before.rows.graphed):
                mx.eval(before.to_eval)  # it may still read blocks that are overwritten at once
            self.pools.copy((copy.pool, copy.source, copy.target) for copy in plan.copies)
        self.media.forget(plan.forgotten)
        encoded = self.media.advance(plan.encoding)
        rows = StepRows()
        given: tuple[mx.array, ...] = ()
        if plan.sequences:
            rows = self._build_rows(plan, before)
            given = () if self._guesser is None else self._guesser.arrays
        # Only a head's layers are left to MLX where pools are written with the output. Waiting for
        # the pools would be waiting for the next step, too, once that is launched.
        with_output = rows.graphed or rows.in_place
        layers = self._guessed_layers if with_output else self._layers
        pools = self.pools.arrays(layers) if layers else []
        return LaunchedStep(
            plan,
            rows,
            self.media.sizes(plan.encoding),
            to_eval=(*rows.arrays, *encoded, *given, *pools),
        )

    def _build_rows(self, plan: StepPlan, last: LaunchedStep | None) -> StepRows:
        before = StepRows() if last is None else last.rows
        inputs = StepInputs(
            plan,
            self._attention,
            before.row_of,
            previous=before.tokens,
            encoded=self.media,
            adapters=self.adapters,
            follow=partial(Following, before=before.kept) if plan.follows else None,
        )
        began = time.perf_counter()
        computed = self._run(inputs)
        if (last is None or last.done) and not self._holds_back():
            # The layers may run while the rest of the step is built. Small segments have run.
            self._layers_launched = True
            self._started_at = began if computed.in_place else time.perf_counter()
            mx.async_eval(computed.output)
        # The layers run also where nobody reads their rows: they write keys.
        runs = computed.graphed or computed.in_place or computed.awaited
        others = (computed.output,) if runs else ()
        done = StepRows(
            others=others,
            graphed=computed.graphed,
            in_place=computed.in_place,
            early=_is_early(computed, plan, last, writes=len(self._guessed_layers) > 0),
            recorded=computed.recorded,
        )
        hidden = None if inputs.narrowed else computed.hidden
        if (
            self._guesser is not None
            and hidden is not None
            and not any(each.sampling for each in inputs.ending)
        ):
            self._guesser.read(inputs, hidden)
        if not inputs.ending:
            return done
        if inputs.wanted is not None and not inputs.narrowed:
            computed = computed.rows(inputs.wanted)
        return self._finish(inputs, computed, hidden, done=done, before=before, plan=plan)

    def _run(self, inputs: StepInputs) -> Computed:
        """Run the model's layers, with the adapters of the rows that have one."""
        if inputs.adapted is None:
            return self._repeated.compute(inputs)
        with current_device().computing_by(inputs.adapted.operations):
            return Computed(self.model(inputs))

    def _finish(
        self,
        inputs: StepInputs,
        computed: Computed,
        hidden: mx.array | None,
        done: StepRows,
        before: StepRows,
        plan: StepPlan,
    ) -> StepRows:
        """Run each task's last stage.

        Args:
            computed: rows for the last stage, in order.
            hidden: see `FinalStates`.
            done: what is known of the step's layers.
        """
        rows: list[int] = []
        row_of: dict[int, int] = {}
        sampling: list[ScheduledSequence] = []
        vectors: dict[int, mx.array] = {}
        first = 0
        for each, count in zip(inputs.ending, inputs.ending_rows, strict=True):
            wanted = range(first, first + count)
            first = wanted.stop
            if each.sampling:
                row_of[each.number] = len(rows)
                sampling.append(each)
                rows += wanted
                continue
            vector = self._vectors.vector(each, computed.hidden[wanted.start : wanted.stop])
            if vector is not None:
                vectors[each.number] = vector
        others = (*done.others, *self._vectors.sums)
        done = done._replace(
            sampling=tuple(sampling), row_of=row_of, vectors=vectors, others=others
        )
        if not rows:
            return done
        own = computed if len(rows) == first else computed.rows(mx.array(rows))
        places = inputs.wanted_rows
        rows = rows if places is None else [places[row] for row in rows]
        counts = [len(each.sampling) for each in sampling]
        least = plan.least_chance if self.leaves_out else 0.0
        states = FinalStates(
            inputs, hidden, rows, counts=counts, sampled=own.hidden, least_chance=least
        )
        return self._sample(done, own, states, before=before, plan=plan)

    def _sample(
        self,
        done: StepRows,
        own: Computed,
        states: FinalStates,
        before: StepRows,
        plan: StepPlan,
    ) -> StepRows:
        """Sample the tokens of `done.sampling`, or leave that to `draw` if masks are awaited.

        Args:
            own: the rows to sample.
        """
        logits = self._logits(own.hidden) if own.logits is None else own.logits
        if self._observe is not None:
            if own.graphed:  # they are read after the next step was computed
                logits = logits + 0
                done = done._replace(others=(*done.others, logits))
            self._observe([row for each in done.sampling for row in sampled_rows(each)], logits)
        rows: list[RowSampling] = []
        for each in done.sampling:
            rows += each.sampling
            unread = len(each.tokens) < each.count
            if unread and each.sampling[-1].history is not None and before.tokens is not None:
                place = before.row_of[each.number]
                rows[-1] = rows[-1]._replace(pending=before.tokens[place : place + 1])
        following = states.inputs.following
        moved = None if following is None else following.sampling(done.sampling)
        unsampled = Unsampled(logits, rows, states, moved=moved)
        if plan.awaits_masks:
            return done._replace(unsampled=unsampled)
        return done._replace(drawn=self._drawn(unsampled, plan.guess))

    def _drawn(self, rows: Unsampled, guess: int) -> Drawn:
        """Sample tokens, and run the draft head for `guess` tokens after each of them."""
        device = current_device()
        sampled = sample(rows.logits, list(rows.rows), moved=rows.moved)
        tokens = device.host_copy(sampled.tokens)
        if self._guesser is None:
            return Drawn(tokens, sampled)
        kept = rows.states.last_kept(tokens.array)
        guesses = self._guesser.guess(rows.states, tokens.array, kept, count=guess)
        copy = None if guesses is None else device.host_copy(guesses)
        return Drawn(tokens, sampled, copy, kept=kept)


def _moves_arrays(plan: StepPlan, pools: Pools) -> bool:
    """Return whether a plan resizes a pool by copying it, array by array."""
    return any(isinstance(each, Resize) and pools.moves_arrays(each) for each in plan.changes)


def _is_early(
    computed: Computed, plan: StepPlan, before: LaunchedStep | None, *, writes: bool
) -> bool:
    """Return whether to launch a step behind the running one, `before`.

    MLX's own writes to the pools would copy them meanwhile: those of the plan's changes, of a head
    that has layers (`writes`), and of a running step that did not write in place. Copies of blocks
    are in place where segments are.
    """
    if computed.graphed:
        return True
    alone = not (plan.changes or writes)
    return computed.in_place and alone and (before is None or before.rows.in_place)
