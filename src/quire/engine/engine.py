"""The engine: runs one step after another, in one thread, as long as there is work."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from quire.cache.disk_tier import DiskTier
from quire.cache.formats.skips import skipped_layers
from quire.cache.formats.table import kv_table
from quire.cache.index import full_keys
from quire.cache.specs import KVLayout
from quire.core.block_keys import SHORT, BlockNames
from quire.core.config import EngineConfig
from quire.core.errors import EngineFailure, RequestError
from quire.core.info import EngineStats, ModelInfo
from quire.core.kv_choice import offered
from quire.core.request import Failure, FinishReason, Output, Request
from quire.device.device import current_device
from quire.device.dtypes import DTYPES
from quire.engine.adapters import RequestAdapters
from quire.engine.constraints import ConstraintFactory
from quire.engine.draft_model import ModelDrafter
from quire.engine.durations import observe_duration
from quire.engine.grammar_queue import GrammarQueue, MakeConstraint
from quire.engine.invariance import check_format
from quire.engine.memory import (
    check_context,
    kv_budget,
    open_blocks,
    reading_ahead,
    wanted_context,
)
from quire.engine.request_media import RequestMedia
from quire.engine.validate import check_default, check_request, positions_of
from quire.executor.executor import Executor
from quire.models.weights.loader import LoadedModel
from quire.sampling.loops import loop_detector
from quire.scheduler.admission import SchedulerConfig
from quire.scheduler.draft_lengths import DraftLengths, WorthwhileDrafts
from quire.scheduler.drafting import Drafting
from quire.scheduler.drafts import Drafter
from quire.scheduler.limits import Limits
from quire.scheduler.measured_steps import MeasuredSteps
from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.positions import TokenPositions
from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import SequenceParts
from quire.speculation.drafters import allowed
from quire.speculation.heads import HeadDrafter

log = logging.getLogger("quire.engine")

_FAULTS_IN_A_ROW = 3
"""Number of failed steps in a row after which the engine stops."""
_IDLE_S = 0.005
"""Seconds to sleep when only the grammar compiler or the disk has work."""


class Engine:
    """Serves requests with one model. Not thread-safe: only the thread that owns MLX calls it.

    `assemble` in `engine.assembly` creates one with its parts.

    Args:
        loaded: the model.
        config: limits and defaults.
        executor: runs the model's steps.
        disk: the disk tier, if any.
        drafters: draft tokens for requests that allow it.
        draft_lengths: chooses how many drafts to verify; None uses measured step times.
        step_times: measured at warm-up; updated by every step.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        executor: Executor,
        disk: DiskTier | None = None,
        drafters: Sequence[Drafter] = (),
        draft_lengths: DraftLengths | None = None,
        step_times: MeasuredSteps | None = None,
    ) -> None:
        self.step_times = step_times or MeasuredSteps()
        self.config = config
        self._loaded, self._executor = loaded, executor
        self._media = RequestMedia(loaded.model.encoders)
        self._groups = KVLayout.of(loaded.model.layout).groups
        self._drafters = frozenset(each.name for each in drafters)
        self.adapters = RequestAdapters(executor.adapters, loaded, config)
        self._head = next((each for each in drafters if isinstance(each, HeadDrafter)), None)
        self._worthwhile = WorthwhileDrafts(self.step_times.sampling)
        held = loaded.parameter_bytes + executor.adapters.nbytes
        budget = kv_budget(config, held, planned=executor.planned_bytes)
        drafted = sum(each.kv_budget for each in drafters if isinstance(each, ModelDrafter))
        current_device().bound_steps(budget + drafted)
        vocabulary = loaded.model.vocab_size
        self._names = _block_names(loaded, config)
        context = wanted_context(config, loaded.context_length)
        self._offered = offered(config.block_size, config.kv_format.group_size)
        check_default(config.kv_format, self._offered, config.block_size)
        check_format(config, self._names.format(wanted=None), executor.serves)
        manager = open_blocks(config, budget, executor, disk=disk)
        lengths, most = draft_lengths or self._worthwhile, executor.most_following
        drafting = Drafting(drafters, lengths, vocabulary, head=self._head, most_following=most)
        limits = Limits(self._groups, manager, config.block_size, max_context=context)
        context = check_context(limits.context(self._names.format(wanted=None)), context)
        prefill_budget = _prefill_budget(config, self.step_times)
        self._scheduler = Scheduler(
            _scheduling(loaded, config, context),
            self._groups,
            manager,
            prefill_budget=prefill_budget,
            identity=self._names.root,
            graph_rows=executor.graph_rows,
            drafting=drafting,
            read_ahead=reading_ahead(disk, manager, executor, budget=prefill_budget),
        )
        self.prepare, self._disk = executor.prepare, disk
        self.constraints = ConstraintFactory(
            loaded.path, vocabulary, loaded.eos_ids, limited=config.stop_on_loop != 0
        )
        self._grammars = GrammarQueue(self.constraints.make)
        self._running: StepPlan | None = None
        """The plan of the running step, whose tokens are not read yet."""
        self._started_at = 0.0  # when the running step started, by `time.perf_counter`
        self._generating_s = 0.0, 0.0  # of the last two steps that only generated
        self._waited_s: float | None = None
        """Seconds that the device waited for the running step; None if unknown."""
        self._unobserved: list[tuple[StepPlan, StepResult, int, float | None]] = []
        """Finished steps to be recorded, each with its computed rows and `_waited_s`."""
        self._faults = 0
        self._beside: list[Output] = []  # of accepted, refused and dropped requests

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. An invalid one ends with an error at a later step."""
        if request.grammar is None:
            self._admit(request, lambda: self.constraints.make(request))
        else:
            self._grammars.add(request)

    def _admit(self, request: Request, make: MakeConstraint) -> None:
        try:
            model, media = self._loaded.model, self._media
            check_request(
                request, config=self.config, model=model, media=media, formats=self._offered
            )
            features = {each.item.key: each.item.features for each in request.media}
            request = self.adapters.named(media.named(request))
            format, repeats = self._names.format(request.kv_format), request.stop_on_loop
            repeats = self.config.stop_on_loop if repeats is None else repeats
            bound = request.grammar is not None and not request.grammar.lazy
            parts = SequenceParts(
                positions=TokenPositions(positions_of(request, model)),
                cross_media=model.cross_media(request.media),
                pieces=media.pieces(request),
                constraint=make(),
                loops=loop_detector(repeats, bound=bound),
                drafters=allowed(request, self.config.speculate, self._drafters),
            )
            # Last, since a request that was taken ends through the scheduler and in no other way.
            self._scheduler.add(request, format, parts)
            for key, content in features.items():
                self._executor.contents.hold_features(key, content)
            tokens = len(request.prompt)
            self._beside.append(Output(request.id, prompt_tokens=tokens, read=0))
        except RequestError as error:
            self._refuse(request, Failure.of(error))
        except Exception:  # whatever a grammar's compiler raises, only this request ends
            log.exception("request %s could not be queued", request.id)
            self._refuse(request, Failure("The request could not be queued."))

    def _refuse(self, request: Request, failure: Failure) -> None:
        tokens = len(request.prompt)
        self._beside.append(
            Output(request.id, finish=FinishReason.ERROR, error=failure, prompt_tokens=tokens)
        )

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request before the next step, with a reason from the text side."""
        dropped = self._grammars.drop(request_id)
        if dropped is None:
            self._scheduler.abort(request_id, reason)
        else:
            self._beside.append(
                Output(request_id, finish=reason, prompt_tokens=len(dropped.prompt))
            )

    def users_of(self, adapter: str) -> int:
        """Return how many unfinished requests name an adapter."""
        compiling = sum(each.adapter == adapter for each in self._grammars)
        return compiling + self._scheduler.users_of(adapter)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._scheduler.has_work or self._running or self._beside or self._grammars)

    @property
    def expected_step_s(self) -> float:
        """Return the expected time of the running step; infinity if there is none or unknown.

        One that only generates is expected to take as long as the last such step, or the one
        before: either may be an outlier. Every step asks, and the tables of step times answer no
        better for rows that hardly change.
        """
        plan = self._running
        if plan is None:
            return math.inf
        if plan.only_generates and (seconds := min(self._generating_s)):
            return seconds
        seconds = self._scheduler.prefill_budget.step_seconds(
            plan.decode_rows, plan.prompt_rows, plan.prompt_keys
        )
        cost = self._scheduler.encodings.cost
        for each in plan.encoding:
            seconds += each.count * (cost.seconds(each.item.kind, each.rows) or math.inf)
        return seconds

    # -- steps ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Launch the rest of the running step. `step` does so too, if needed.

        On a CPU this takes nearly as long as the step. Requests that arrive meanwhile and are added
        before `step` are part of the step that it plans.

        Raises:
            EngineFailure: as `step`.
        """
        try:
            self._executor.flush()
        except Exception as error:  # as in `step`
            self._beside += self._fail_step(error)

    def step(self) -> list[Output]:
        """Plan the next step while one runs, start it, and read the finished one's tokens.

        Raises:
            EngineFailure: steps fail again and again; the engine cannot go on.
        """
        try:
            outputs = self._step()
        except Exception as error:  # whatever MLX or a model raises, only this step's rows end
            outputs = self._fail_step(error)
        for key in self._scheduler.encodings.take_unused():
            self._executor.contents.release_features(key)
        beside, self._beside = self._beside, []
        return beside + outputs

    def _step(self) -> list[Output]:
        self._executor.flush()
        for request, make in self._grammars.take():
            self._admit(request, make)
        read_at = self._read_early()
        drafting, scheduler = self._scheduler.drafting, self._scheduler
        drafting.computing_s = 0.0
        plan = scheduler.schedule()
        if plan is not None and (guess := drafting.worth_guessing(scheduler.running)):
            plan = replace(plan, guess=guess, least_chance=drafting.least_chance)
        before, self._running = self._running, plan
        before_at, self._started_at = self._started_at, self._executor.launch(plan)
        # The device has its next step by now.
        while self._unobserved:
            self._observe(*self._unobserved.pop())
        # What drafters compute is known to `Drafting` as their time for a token.
        waited = None if read_at is None else self._started_at - read_at - drafting.computing_s
        if before is None:
            self._wait_for_others()
        else:
            done_at = before_at + self._take_in(before)
            if plan is not None and plan.follows:
                waited = max(0.0, self._started_at - done_at)
            if plan is not None and plan.awaits_masks:
                self._executor.draw(self._scheduler.masks(plan))
        self._waited_s = waited
        return self._scheduler.take_outputs()

    def _read_early(self) -> float | None:
        """Read the running step's tokens before the next one is planned, if drafts need them.

        Returns:
            When that step was done, by `time.perf_counter`; None if it may still run.
        """
        before, scheduler = self._running, self._scheduler
        if before is None or not scheduler.drafting.wants_tokens(scheduler.running):
            return None
        self._running = None
        self._executor.launch(plan=None)
        done_at = time.perf_counter()
        self._take_in(before)
        return done_at

    def _take_in(self, plan: StepPlan) -> float:
        """Process the tokens of a finished step; return how many seconds it ran."""
        result = self._executor.collect()
        if plan.only_generates and not result.recorded:
            self._generating_s = self._generating_s[1], result.seconds
        rows = plan.decode_rows
        if self._head is not None and rows <= self._executor.most_following:
            rows -= self._head.left_out(plan)
        self._unobserved.append((plan, result, rows, self._waited_s))
        self._scheduler.update(plan, result)
        if self._head is not None:
            self._head.take(result.guesses)
        self._faults = 0
        return result.seconds

    def _observe(
        self, plan: StepPlan, result: StepResult, rows: int, waited_s: float | None
    ) -> None:
        """Record the times of a finished step, unless a graph was recorded or verified for it."""
        if not result.recorded:
            observe_duration(self._scheduler, plan, result, rows=rows, head=self._head)
            if waited_s is not None:
                read = not plan.follows or plan.decode_rows > self._executor.most_following
                self._worthwhile.observe_wait(waited_s, plan.generating, read=read)

    def _wait_for_others(self) -> None:
        """Sleep briefly if only the grammar compiler or the disk has work."""
        if self._running is not None:
            return
        if self._grammars:
            self._grammars.wait(_IDLE_S)
        elif self._disk is not None and self._scheduler.waits_for_disk:
            self._disk.wait(_IDLE_S)

    def _fail_step(self, error: Exception) -> list[Output]:
        """End the requests of a failed step with an error, and drop the cache."""
        self._faults += 1
        self._running = None
        if self._faults >= _FAULTS_IN_A_ROW:
            log.exception("a step failed again; the engine stops")
            raise EngineFailure(f"{self._faults} steps failed in a row") from error
        log.exception("a step failed; all its requests end with an error")
        self._scheduler.start_over(Failure("The engine failed on this step; its log says why."))
        self._executor.clear()
        return self._scheduler.take_outputs()

    # -- the disk tier -------------------------------------------------------------------------

    def close(self) -> None:
        """Drop waiting grammars, and give the disk tier some time to write cached blocks."""
        self._grammars.close()
        if self._disk is not None:
            self._scheduler.manager.spill_kept()
            self._executor.launch(StepPlan(changes=self._scheduler.manager.take_changes()))
            self._executor.launch(plan=None)
            self._disk.close()

    # -- facts ---------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """The description of the served model."""
        return ModelInfo(
            path=str(self._loaded.path),
            model_type=str(self._loaded.config.get("model_type", "")),
            vocab_size=self._loaded.model.vocab_size,
            context_length=self._scheduler.limits.max_context,
            trained_length=min(self._loaded.trained_length, self._scheduler.limits.max_context),
            dtype=self._loaded.dtype,
            device=current_device().name,
            kv_memory=self._scheduler.manager.capacity.budget,
            parameters=self._loaded.parameters,
            weight_bytes=self._loaded.parameter_bytes,
            generates=not self._loaded.model.bidirectional,
            labels=self._loaded.model.labels,
            token_types=self._loaded.model.token_types,
            modalities=("text", *self._loaded.model.encoders),
            kv_formats=tuple(each.name for each in self._offered),
            blocks=self._names,
            kv_table=kv_table(
                self._groups,
                self._names.format(wanted=None),
                self.config.block_size,
                dtype=DTYPES[self._loaded.dtype],
                context=self._scheduler.limits.max_context,
            ),
        )

    def stats(self) -> EngineStats:
        """Return the engine's counters and gauges."""
        scheduler = self._scheduler
        counters = scheduler.counters
        usage = scheduler.manager.capacity.usage()
        names = {key: f"{key.group}/{key.format.name}{'/open' * key.tail}" for key in usage}
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            kv_budget=scheduler.manager.capacity.budget,
            kv_used=tuple((names[key], live) for key, (live, _, _) in usage.items()),
            kv_kept=tuple((names[key], kept) for key, (_, kept, _) in usage.items()),
            kv_block_bytes=tuple(
                (name, scheduler.manager.capacity.block_bytes(key)) for key, name in names.items()
            ),
            memory=tuple(current_device().memory().items()),
            reuse_misses=tuple(counters.reuse_misses.items()),
            disk=tuple(asdict(self._disk.counters).items()) if self._disk is not None else (),
            finished=tuple(counters.finished.items()),
            drafts=tuple(scheduler.drafting.drafted.items()),
            accepted_drafts=tuple(scheduler.drafting.accepted.items()),
            work_seconds=self._executor.work_seconds,
        )

    def cached(self) -> bytes:
        """Return the short keys of all full blocks that a prompt may reuse, concatenated."""
        return b"".join(key[:SHORT] for key in full_keys(self._scheduler.sharing.index))


def _scheduling(loaded: LoadedModel, config: EngineConfig, context: int) -> SchedulerConfig:
    whole = loaded.model.bidirectional
    return SchedulerConfig(
        config.block_size,
        config.max_sequences,
        context,
        prefix_cache=config.prefix_cache and not whole,
        whole_prompts=whole,
    )


def _prefill_budget(config: EngineConfig, times: MeasuredSteps) -> PrefillBudget:
    return PrefillBudget(
        config.step_ms / 1e3, config.stall_factor, config.max_step_tokens, times=times
    )


def _block_names(loaded: LoadedModel, config: EngineConfig) -> BlockNames:
    skipped = skipped_layers(loaded.model.own_layout, config.kv_skip_layers)
    return config.block_names(loaded.fingerprint, skipped)
