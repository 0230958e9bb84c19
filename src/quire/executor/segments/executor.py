"""Runs steps on a CPU by segments where these serve, and through the model elsewhere."""

from __future__ import annotations

from quire.cache.disk_transfer import SpillTo
from quire.cache.pools import Pools
from quire.executor.eager import EagerExecutor, Observe
from quire.executor.guessing import Guesser
from quire.executor.inputs import StepInputs
from quire.executor.segments.runner import StepSegments
from quire.executor.step import Computed
from quire.models.base import LanguageModel


class SegmentExecutor(EagerExecutor):
    """Runs steps by segments of their program. Implements `Executor`.

    Steps that segments do not serve, such as those with media or adapters, run eagerly.
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
        super().__init__(model, pools, guesser=guesser, spill=spill, observe=observe)
        self.segments = segments

    def _run(self, inputs: StepInputs) -> Computed:
        found = self.segments.compute(inputs, self.pools, lambda: self.model(inputs))
        return super()._run(inputs) if found is None else Computed(found)
