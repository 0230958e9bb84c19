"""Steps before which blocks are copied run as CUDA graphs, too."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest

from quire.core.kv_format import KVFormat
from quire.executor.graphs.launching import StepLaunching


@pytest.mark.parametrize("pending", [True, False])
def test_writes_to_pools_are_launched_before_a_graph(
    pending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no graph: the extension has no address of an array that was never launched."""
    array = mx.ones(3) + 1
    launched: list[mx.array] = [] if pending else [array]
    async_eval = mx.async_eval

    def noted(*arrays: mx.array) -> None:
        launched.extend(arrays)
        async_eval(*arrays)

    def arrays(layers: Sequence[int]) -> list[mx.array]:
        assert list(layers) == [0, 1]
        return [array]

    monkeypatch.setattr(mx, "async_eval", noted)
    cache: Any = SimpleNamespace(graph=lambda rows, format: "a graph" if launched else None)
    pools: Any = SimpleNamespace(arrays=arrays)
    layout: Any = SimpleNamespace(group=[0, 0])
    launching = StepLaunching(cache, layout, pools, extension=cast(Any, None))
    assert launching.graphs(16, KVFormat()) == "a graph"
    assert len(launched) == 1
