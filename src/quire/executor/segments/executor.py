"""Runs steps on a CPU by segments where these serve, and through the model elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from quire.cache.pools import Pools
from quire.executor.adapters import AdaptedRows, Factors
from quire.executor.computed import Computed
from quire.executor.eager import EagerExecutor
from quire.executor.guessing import Guesser
from quire.executor.inputs import StepInputs
from quire.executor.segments.runner import FEW_ROWS, StepSegments
from quire.models.base import LanguageModel


class SegmentExecutor(EagerExecutor):
    """Runs steps by segments of their program. Implements `Executor`.

    Steps that segments do not serve, such as those with media, run eagerly.

    Args:
        others: further arguments of `EagerExecutor`.
    """

    def __init__(
        self,
        model: LanguageModel,
        pools: Pools,
        segments: StepSegments,
        **others: Any,
    ) -> None:
        guesser: Guesser | None = others.get("guesser")
        places = guesser is None or not guesser.behind  # else its rows are placed by the host
        if places and others.get("observe") is None:  # positions of observed logits are the host's
            others["follows"] = segments.follows
            self.most_following = FEW_ROWS
            self.leaves_out = guesser is not None and guesser.weighs
        super().__init__(model, pools, logits=segments.logits_of, **others)
        self.segments = segments
        self._adapted: WeakKeyDictionary[Factors, StepSegments | None] = WeakKeyDictionary()
        """Segments of steps with adapters, for as long as these are in memory."""

    def _run(self, inputs: StepInputs) -> Computed:
        eagerly, segments = partial(super()._run, inputs), self._segments_of(inputs.adapted)
        if segments is None:
            return eagerly()
        found = segments.compute(inputs, self.pools, lambda: eagerly().hidden)
        return eagerly() if found is None else found

    def _segments_of(self, adapted: AdaptedRows | None) -> StepSegments | None:
        """Return the segments of a step; None if the model must compute it."""
        if adapted is None:
            return self.segments
        if adapted.factors not in self._adapted:
            self._adapted[adapted.factors] = self.segments.with_low_rank(adapted.factors.by_name)
        return self._adapted[adapted.factors]
