"""Runs steps as CUDA graphs where these serve, and through the model elsewhere."""

from __future__ import annotations

from quire.cache.disk_transfer import SpillTo
from quire.cache.pools import Pools
from quire.core.kv_format import KVFormat
from quire.executor.eager import EagerExecutor, Observe
from quire.executor.graphs.runner import CUDAGraphs
from quire.executor.guessing import Guesser
from quire.executor.inputs import StepInputs
from quire.executor.step import Computed
from quire.models.base import LanguageModel


class GraphExecutor(EagerExecutor):
    """Runs steps as CUDA graphs. Implements `Executor`.

    Steps that no graph serves, such as those with media or adapters, run eagerly.
    """

    def __init__(
        self,
        model: LanguageModel,
        pools: Pools,
        graphs: CUDAGraphs,
        *,
        guesser: Guesser | None = None,
        spill: SpillTo | None = None,
        observe: Observe | None = None,
    ) -> None:
        super().__init__(model, pools, guesser=guesser, spill=spill, observe=observe)
        self.graphs = graphs

    def serves(self, format: KVFormat) -> bool:
        return self.graphs.serves_format(format)

    def max_graph_rows(self, format: KVFormat, media: bool) -> int:
        return self.graphs.max_graph_rows(format, media)

    def _run(self, inputs: StepInputs) -> Computed:
        return self.graphs.compute(inputs, lambda: self.model(inputs)) or super()._run(inputs)
