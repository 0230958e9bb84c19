"""Runs steps on a CPU by segments where these serve, and through the model elsewhere."""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

from quire.cache.disk_transfer import SpillTo
from quire.cache.pools import Pools
from quire.executor.adapters import AdaptedRows, Factors
from quire.executor.eager import EagerExecutor, Observe
from quire.executor.guessing import Guesser
from quire.executor.inputs import StepInputs
from quire.executor.segments.runner import StepSegments
from quire.executor.step import Computed
from quire.models.base import LanguageModel


class SegmentExecutor(EagerExecutor):
    """Runs steps by segments of their program. Implements `Executor`.

    Steps that segments do not serve, such as those with media, run eagerly.
    """

    def __init__(
        self,
        model: LanguageModel,
        pools: Pools,
        segments: StepSegments,
        *,
        guesser: Guesser | None = None,
        spill: SpillTo | None = None,
        observe: Observe | None = None,
    ) -> None:
        super().__init__(
            model,
            pools,
            guesser=guesser,
            spill=spill,
            observe=observe,
            logits=segments.logits_of,
            # Positions of observed logits are the host's.
            follows=segments.follows if observe is None else lambda plan: False,
        )
        self.segments = segments
        self._adapted: WeakKeyDictionary[Factors, StepSegments | None] = WeakKeyDictionary()
        """Segments of steps with adapters, for as long as these are in memory."""

    def _run(self, inputs: StepInputs) -> Computed:
        eagerly, adapted = partial(super()._run, inputs), inputs.adapted
        segments = self._segments_of(adapted)
        if segments is None:
            return eagerly()
        numbers = None if adapted is None else adapted.numbers
        found = segments.compute(inputs, self.pools, lambda: eagerly().hidden, numbers=numbers)
        return eagerly() if found is None else found

    def _segments_of(self, adapted: AdaptedRows | None) -> StepSegments | None:
        """Return the segments of a step; None if the model must compute it."""
        if adapted is None:
            return self.segments
        if adapted.factors not in self._adapted:
            self._adapted[adapted.factors] = self.segments.with_low_rank(adapted.factors.by_name)
        return self._adapted[adapted.factors]
