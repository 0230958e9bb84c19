"""Recorded steps, as engines open them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.executor import factory
from quire.executor.graphs.opening import open_cuda_graphs
from quire.executor.graphs.runner import CUDAGraphs
from quire.executor.inputs import StepInputs
from tests.executor.graphs.recorded import Compared
from tests.support.choices import Choices


@pytest.fixture
def wholes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CUDAGraphs]]:
    """Yield the graphs that engines open from now on."""
    found: list[CUDAGraphs] = []

    def noted(*arguments: Any, **options: Any) -> CUDAGraphs | None:
        whole = open_cuda_graphs(*arguments, **options)
        if whole is not None:
            found.append(whole)
        return whole

    monkeypatch.setattr(factory, "open_cuda_graphs", noted)
    yield found
    found.clear()


@pytest.fixture
def recorded_prompts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the prompt rows of each recorded step that has any."""
    found: list[int] = []
    compute = CUDAGraphs.compute

    def noted(self: CUDAGraphs, inputs: StepInputs, *arguments: Any, **options: Any) -> Any:
        computed = compute(self, inputs, *arguments, **options)
        rows = [each.count for each in inputs.sequences if each.count > 1 or not each.start]
        if rows and computed is not None and computed.graphed:
            found.append(sum(rows))
        return computed

    monkeypatch.setattr(CUDAGraphs, "compute", noted)
    return found


@pytest.fixture
def compared(
    wholes: list[CUDAGraphs], recorded_prompts: list[int], monkeypatch: pytest.MonkeyPatch
) -> Compared:
    return Compared(wholes, recorded_prompts, Choices(monkeypatch), monkeypatch)
