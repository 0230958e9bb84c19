"""Tests the executors that engines get."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest

from quire.cache.pools import Pools
from quire.executor import factory
from quire.models.weights.loader import LoadedModel


class _Graphs:
    """Notes the pools that it is bound to."""

    def __init__(self) -> None:
        self.bound: list[Pools] = []

    def use(self, pools: Pools) -> None:
        self.bound.append(pools)


@pytest.mark.parametrize("found", [True, False], ids=["graphs", "none"])
def test_engines_of_a_model_share_its_graphs(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, opened = _Graphs() if found else None, list[Any]()

    def opens(*arguments: Any, **settings: Any) -> _Graphs | None:
        opened.append(arguments)
        return graphs

    monkeypatch.setattr(factory, "open_cuda_graphs", opens)
    model = SimpleNamespace(layout=())
    loaded = cast(LoadedModel, SimpleNamespace(model=model, fingerprint="weights"))
    pools = [Pools((), 16, mx.float32) for _ in range(3)]
    shared = factory.SharedGraphs()
    given = [shared.open(loaded, each, batch_invariant=False) for each in pools]
    assert given == [graphs] * 3
    assert len(opened) == 1
    assert opened[0][2] is pools[0]
    if graphs is not None:
        assert graphs.bound == pools[1:]
