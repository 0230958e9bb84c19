"""Runs steps as CUDA graphs where these serve, and through the model elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from quire.cache.pools import Pools
from quire.core.kv_format import KVFormat
from quire.executor.adapters import AdaptedRows, Factors
from quire.executor.computed import Computed
from quire.executor.eager import EagerExecutor
from quire.executor.encoder_cache import EncoderCache
from quire.executor.graphs.encoders import EncoderGraphs
from quire.executor.graphs.runner import CUDAGraphs
from quire.executor.inputs import SomeRows, StepInputs
from quire.executor.step import LaunchedStep
from quire.models.base import LanguageModel
from quire.sampling.sampler import may_move
from quire.scheduler.plan import GraphRows, StepPlan


class GraphExecutor(EagerExecutor):
    """Runs steps as CUDA graphs. Implements `Executor`.

    Steps that no graph serves, such as those with media, run eagerly.

    Args:
        graphs: None if none serves the model.
        encoders: graphs of its encoders; None if the encoders run eagerly.
        others: further arguments of `EagerExecutor`.
    """

    def __init__(
        self,
        model: LanguageModel,
        pools: Pools,
        graphs: CUDAGraphs | None,
        encoders: EncoderGraphs | None = None,
        **others: Any,
    ) -> None:
        if others.get("observe") is None:  # positions of observed logits are the host's
            others["follows"] = self._places
        super().__init__(model, pools, **others)
        self._encoders = encoders
        if encoders is not None:
            features = self.contents.features
            self.planned_bytes = encoders.max_bytes
            self.media = EncoderCache(model.encoders, features, encode=encoders.encode)
        self._graphs = graphs
        if graphs is not None and graphs.placing is not None:
            self.most_following = graphs.placing.most_rows
        self._behind = () if graphs is None else graphs.behind
        if self._behind and self._guesser is not None:
            self._guesser.run_by(self._run_behind)
        self._factors: Factors | None = None
        """The adapters' factors that `_adapted` was made for."""
        self._adapted: CUDAGraphs | None = None
        """Graphs of steps with adapters."""

    def serves(self, format: KVFormat) -> bool:
        return self._graphs is not None and self._graphs.serves_format(format)

    def graph_rows(self, format: KVFormat, media: bool) -> GraphRows:
        return GraphRows() if self._graphs is None else self._graphs.graph_rows(format, media)

    def _places(self, plan: StepPlan) -> bool:
        """Return whether graphs compute a plan whose rows' places are on the device."""
        before, rows = self._running, plan.sequences
        if self._graphs is None or before is None or not self._guesses_behind(plan, before):
            return False
        if any(each.adapter or each.crossed for each in rows) or before.rows.drawn is None:
            return False
        sampling = [row for each in rows for row in each.sampling]
        return may_move(sampling) and self._graphs.follows(rows, before.rows.kept)

    def _guesses_behind(self, plan: StepPlan, before: LaunchedStep) -> bool:
        """Return whether the guesser, if any, reads rows whose places are on the device."""
        guesser, rows = self._guesser, plan.sequences
        if guesser is None:
            return True
        if not guesser.may_follow(plan.guess) or len(self._behind) < len(guesser.behind):
            return False
        every = all(each.sampled == each.count for each in rows)
        return every and all(each.follows(rows, before.rows.kept) for each in self._behind)

    def _build(self, plan: StepPlan, before: LaunchedStep | None) -> LaunchedStep:
        others = [each for each in (self._encoders, *self._behind) if each is not None]
        made = [each.made for each in others]
        step = super()._build(plan, before)
        if [each.made for each in others] == made:
            return step
        return step._replace(rows=step.rows._replace(recorded=True))

    def _run(self, inputs: StepInputs) -> Computed:
        eagerly, graphs = partial(super()._run, inputs), self._graphs_of(inputs.adapted)
        if graphs is None:
            return eagerly()
        made = graphs.made
        computed = graphs.compute(
            inputs, lambda: eagerly().hidden, every_row=self._guesser is not None
        )
        if computed is None:
            assert inputs.following is None, "graphs compute rows whose places are on the device"
            computed = eagerly()
        return computed._replace(recorded=computed.recorded or graphs.made > made)

    def _run_behind(
        self, number: int, rows: SomeRows, run_eagerly: Callable[[], mx.array]
    ) -> Computed:
        computed = self._behind[number].compute(rows, run_eagerly, every_row=True)
        return computed or Computed(run_eagerly())

    def _graphs_of(self, adapted: AdaptedRows | None) -> CUDAGraphs | None:
        """Return the graphs of a step; None if the model must compute it."""
        if not self.adapters.names:
            self._factors = self._adapted = None  # which hold the memory of former adapters
        if adapted is None or self._graphs is None:
            return self._graphs
        if adapted.factors is not self._factors:
            self._factors = adapted.factors
            self._adapted = self._graphs.with_low_rank(
                adapted.factors.by_name, before=self._adapted
            )
        return self._adapted
