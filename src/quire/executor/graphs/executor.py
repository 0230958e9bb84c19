"""Runs steps as CUDA graphs where these serve, and through the model elsewhere."""

from __future__ import annotations

from typing import Any

from quire.cache.pools import Pools
from quire.core.kv_format import KVFormat
from quire.executor.eager import EagerExecutor
from quire.executor.graphs.runner import CUDAGraphs
from quire.executor.inputs import StepInputs
from quire.executor.step import Computed
from quire.models.base import LanguageModel


class GraphExecutor(EagerExecutor):
    """Runs steps as CUDA graphs. Implements `Executor`.

    Steps that no graph serves, such as those with media or adapters, run eagerly.

    Args:
        graphs: None if none serves the model.
        others: further arguments of `EagerExecutor`.
    """

    def __init__(
        self,
        model: LanguageModel,
        pools: Pools,
        graphs: CUDAGraphs | None,
        **others: Any,
    ) -> None:
        super().__init__(model, pools, **others)
        self._graphs = graphs

    def serves(self, format: KVFormat) -> bool:
        return self._graphs is not None and self._graphs.serves_format(format)

    def max_graph_rows(self, format: KVFormat, media: bool) -> int:
        return 0 if self._graphs is None else self._graphs.max_graph_rows(format, media)

    def _run(self, inputs: StepInputs) -> Computed:
        computed = None
        if self._graphs is not None and inputs.adapted is None:
            computed = self._graphs.compute(inputs, lambda: self.model(inputs))
        return computed or super()._run(inputs)
