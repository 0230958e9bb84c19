"""Which graph a step runs as."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.executor.executor import StepResult
from quire.executor.graphs import runner
from quire.executor.graphs.runner import CUDAGraphs
from quire.executor.graphs.step_check import StepCheck
from tests.executor.graphs.recorded import opened
from tests.executor.graphs.test_recording import FAMILIES
from tests.support.emulated_card import EmulatedExtension, emulate_card
from tests.support.parity import Company, executor_of, prompts

PLAIN = EngineConfig("", kv_memory=64 << 20, prefix_cache=False)


def test_a_graph_that_differs_leaves_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_card(monkeypatch)
    asked = [replace(each, max_tokens=6) for each in prompts([9])]

    def tokens() -> list[int]:
        return Company(opened(FAMILIES["llama"]), PLAIN).run(asked)["r0"].tokens

    def differs(check: StepCheck, *_: object, **__: object) -> str:
        if check._inputs.sequences[0].start == 0:
            for array in check._pools.arrays():
                array[:] = 1
        return "relative error nan"

    monkeypatch.setattr(StepCheck, "difference", lambda *_, **__: "relative error nan")
    expected = tokens()
    assert len(expected) == 6
    monkeypatch.setattr(StepCheck, "difference", differs)
    assert tokens() == expected


def test_a_larger_graph_serves_the_steps_of_one_that_differs(
    wholes: list[CUDAGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So all steps up to the largest graph are planned as graphed."""
    emulate_card(monkeypatch)

    def replay(*_: object, workspace: mx.array, rows: int, **__: object) -> mx.array:
        return workspace[:rows]

    found = iter(["relative error nan"])
    monkeypatch.setattr(EmulatedExtension, "replay", replay)
    monkeypatch.setattr(StepCheck, "difference", lambda *_, **__: next(found, None))
    company = Company(opened(FAMILIES["llama"]), PLAIN)
    executor = executor_of(company.engine)
    results: list[StepResult] = []
    collect = executor.collect
    monkeypatch.setattr(executor, "collect", lambda: results.append(collect()) or results[-1])
    (request,) = prompts([1])
    company.run([replace(request, max_tokens=6)])
    (graphs,) = wholes
    assert graphs.verified == {(KVFormat(), 1): False, (KVFormat(), 2): True}
    assert [each.graphed for each in results] == [False, False, *[True] * (len(results) - 2)]
    assert len(results) >= 6
    assert graphs.graph_rows(KVFormat(), media=False).most == runner.WIDE_ROWS
