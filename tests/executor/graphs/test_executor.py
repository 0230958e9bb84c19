"""The executor of recorded steps, with graphs that a test scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import mlx.core as mx

from quire.executor.factory import open_pools
from quire.executor.graphs.executor import GraphExecutor
from quire.executor.graphs.runner import CUDAGraphs
from quire.executor.inputs import StepInputs
from quire.executor.step import Computed
from quire.models.weights.loader import open_model
from tests.executor.test_eager import CONFIG, PROMPT, resized, rows
from tests.support.tiny_models import tiny_model


class _Graphs:
    """Runs the model in place of graphs, and makes one for each new number of rows."""

    def __init__(self) -> None:
        self._rows: set[int] = set()

    @property
    def made(self) -> int:
        return len(self._rows)

    def compute(
        self, inputs: StepInputs, run_eagerly: Callable[[], mx.array], *, every_row: bool
    ) -> Computed:
        assert not every_row, "there is no draft head"
        self._rows.add(sum(each.count for each in inputs.sequences))
        return Computed(run_eagerly(), graphed=True)


def test_results_say_whether_a_graph_was_recorded_for_the_step(tmp_path: Path) -> None:
    """Such a step was waited for much longer than others."""
    loaded = open_model(str(tiny_model(tmp_path, "llama")), dtype="float32")
    graphs = cast(CUDAGraphs, _Graphs())
    executor = GraphExecutor(loaded.model, open_pools(loaded, CONFIG), graphs)
    recorded = []
    for count in (16, 16, 8):
        executor.launch(resized(rows(PROMPT[:count])))
        executor.launch(None)
        recorded.append(executor.collect().recorded)
    assert recorded == [True, False, True]
