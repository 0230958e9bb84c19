"""Tests the executors that engines get."""

from __future__ import annotations

import weakref
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

    def use(self, pools: Pools, compiling: object) -> None:
        self.bound.append(pools)


def with_graphs(graphs: _Graphs | None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let `open_cuda_graphs` return `graphs`. Return a list of its calls' arguments."""
    opened: list[Any] = []

    def opens(*arguments: Any, **settings: Any) -> _Graphs | None:
        opened.append(arguments)
        return graphs

    monkeypatch.setattr(factory, "open_cuda_graphs", opens)
    return opened


LOADED = cast(LoadedModel, SimpleNamespace(model=SimpleNamespace(layout=()), fingerprint="weights"))


@pytest.mark.parametrize("found", [True, False], ids=["graphs", "none"])
def test_engines_of_a_model_share_its_graphs(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = _Graphs() if found else None
    opened = with_graphs(graphs, monkeypatch)
    pools = [Pools((), 16, mx.float32) for _ in range(3)]
    shared = factory.SharedGraphs()
    given = [shared.open(LOADED, each, batch_invariant=False) for each in pools]
    assert given == [graphs] * 3
    assert len(opened) == 1
    assert opened[0][2] is pools[0]
    if graphs is not None:
        assert graphs.bound == pools[1:]


def test_graphs_let_go_of_a_discarded_engine_s_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = _Graphs()
    with_graphs(graphs, monkeypatch)
    shared = factory.SharedGraphs()
    shared.release()
    assert not graphs.bound
    shared.open(LOADED, Pools((), 16, mx.float32), batch_invariant=False)
    pools = Pools((), 16, mx.float32)
    shared.open(LOADED, pools, batch_invariant=False)
    held = weakref.ref(pools)
    shared.release()
    del graphs.bound[:-1], pools
    assert held() is None
    (last,) = graphs.bound
    assert (last.block_size, last.dtype) == (16, mx.float32)
