"""Steps run eagerly while kernels of their graphs are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.executor.executor import StepResult
from quire.executor.factory import open_executor
from quire.executor.graphs.compiling import Compiling
from quire.executor.graphs.runner import CUDAGraphs
from quire.models.weights.loader import LoadedModel
from tests.executor.graphs.recorded import opened
from tests.executor.graphs.test_recording import FAMILIES
from tests.support.emulated_card import EmulatedCompiler, EmulatedExtension, emulate_card
from tests.support.parity import Company, executor_of, prompts

PLAIN = EngineConfig("", kv_memory=64 << 20, prefix_cache=False)
TOKENS = 6


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return opened(FAMILIES["llama"])


class _Endless:
    """A compiler that ends no job before `ended` is set.

    Attributes:
        asked: the sources of each call, compiled in the background.
        waits: number of calls that would have waited for a job without end.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended = False
        self.asked: list[set[str]] = []
        self.waits = 0
        functions = EmulatedCompiler.functions

        def start(_: EmulatedCompiler, sources: Sequence[str]) -> bool:
            self.asked.append(set(sources))
            return self.ended

        def waited(compiler: EmulatedCompiler, sources: Sequence[str]) -> list[int]:
            self.waits += not self.ended
            return functions(compiler, sources)

        monkeypatch.setattr(EmulatedCompiler, "start", start)
        monkeypatch.setattr(EmulatedCompiler, "functions", waited)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> _Endless:
    """A compiler without end, on a card that runs no graph."""
    emulate_card(monkeypatch)

    def replay(*_: object, **__: object) -> mx.array:
        raise RuntimeError("nothing is replayed")

    monkeypatch.setattr(EmulatedExtension, "replay", replay)
    return _Endless(monkeypatch)


def test_streams_go_on_eagerly_while_kernels_are_compiled(
    loaded: LoadedModel,
    endless: _Endless,
    wholes: list[CUDAGraphs],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    behind = partial(open_executor, compiling=Compiling.BEHIND)
    company = Company(loaded, PLAIN, open_executor=behind)
    executor = executor_of(company.engine)
    results: list[StepResult] = []
    collect = executor.collect
    monkeypatch.setattr(executor, "collect", lambda: results.append(collect()) or results[-1])
    asked = [replace(each, max_tokens=TOKENS) for each in prompts([3, 5])]
    answers = company.run(asked)
    assert [len(answers[each.id].tokens) for each in asked] == [TOKENS, TOKENS]
    assert len(results) >= TOKENS
    assert not any(each.graphed for each in results)
    (graphs,) = wholes
    assert not graphs.verified, "no graph was made"
    assert endless.asked
    assert not endless.waits
    endless.ended = True
    calls = len(endless.asked)
    again = [replace(each, id=f"again {each.id}") for each in asked]
    company.run(again)
    assert graphs.verified.keys() >= {(KVFormat(), 2)}, "its graph was tried"
    company.run([replace(each, id=f"third {each.id}") for each in asked])
    assert len(endless.asked) <= calls + len(graphs.verified), "asked once for each row count"


def test_a_warm_up_compiles_all_row_counts_while_the_first_step_runs(
    loaded: LoadedModel, endless: _Endless, wholes: list[CUDAGraphs]
) -> None:
    ahead = partial(open_executor, compiling=Compiling.AHEAD)
    company = Company(loaded, PLAIN, open_executor=ahead)
    (request,) = prompts([3])
    company.add(replace(request, max_tokens=2))
    company.step()
    assert len(endless.asked) == 12, "steps of 1, 2, 4, ... 2048 rows"
    assert endless.waits == 1, "the step waits for its own kernels alone"
