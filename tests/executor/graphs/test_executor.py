"""The executor of recorded steps, with graphs that a test scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest

from quire.core.kv_format import KVFormat
from quire.executor.computed import Computed
from quire.executor.factory import open_pools
from quire.executor.graphs.executor import GraphExecutor
from quire.executor.graphs.runner import CUDAGraphs
from quire.executor.graphs.verifications import LongContexts
from quire.executor.inputs import StepInputs
from quire.models.weights.loader import open_model
from tests.executor.test_eager import CONFIG, PROMPT, resized, rows
from tests.support.tiny_models import tiny_model

PAGE = KVFormat("page", 4, 4)
VERIFIED = 4
"""Number of rows of a step whose graph is verified, though it was made before."""


class _Graphs:
    """Runs the model in place of graphs, and makes one for each new number of rows."""

    behind = ()
    placing = None

    def __init__(self) -> None:
        self._rows: set[int] = set()

    @property
    def made(self) -> int:
        return len(self._rows)

    def compute(
        self, inputs: StepInputs, run_eagerly: Callable[[], mx.array], *, every_row: bool
    ) -> Computed:
        assert not every_row, "there is no draft head"
        count = sum(each.count for each in inputs.sequences)
        if count == VERIFIED:
            return Computed(run_eagerly(), recorded=True)
        self._rows.add(count)
        return Computed(run_eagerly(), graphed=True)


def test_results_say_whether_a_graph_was_recorded_or_verified_for_the_step(tmp_path: Path) -> None:
    """Such a step was waited for much longer than others, or was done before it was waited for."""
    loaded = open_model(str(tiny_model(tmp_path, "llama")), dtype="float32")
    graphs = cast(CUDAGraphs, _Graphs())
    executor = GraphExecutor(loaded.model, open_pools(loaded, CONFIG), graphs)
    recorded = []
    for count in (16, 16, 8, VERIFIED):
        executor.launch(resized(rows(PROMPT[:count])))
        executor.launch(None)
        recorded.append(executor.collect().recorded)
    assert recorded == [True, False, True, True]


def test_a_step_in_which_a_graph_is_verified_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the graph was made long before: of rows over codes, when contexts double."""
    inputs = cast(StepInputs, SimpleNamespace(sequences=[SimpleNamespace(format=PAGE, end=5000)]))
    hidden = mx.zeros((128, 8))
    found = {"_serves": True, "_graph_rows": 128, "_verified": hidden}
    for name, value in found.items():
        monkeypatch.setattr(CUDAGraphs, name, lambda *_, value=value: value)
    monkeypatch.setattr(CUDAGraphs, "_computed", lambda *_, **__: Computed(hidden, graphed=True))
    graphs = CUDAGraphs.__new__(CUDAGraphs)
    graphs._batch_invariant, graphs._long_contexts = False, LongContexts()
    graphs._kernels = cast(Any, SimpleNamespace(has=lambda *_: True))
    graphs._known = cast(Any, SimpleNamespace(of_all=lambda *_: True))
    recorded = []
    for _ in range(2):
        computed = graphs.compute(inputs, lambda: hidden)
        assert computed is not None
        recorded.append(computed.recorded)
    assert recorded == [True, False]
