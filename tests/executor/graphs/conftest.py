"""Recorded steps, as engines open them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.executor import factory
from quire.executor.graphs.opening import open_cuda_graphs
from quire.executor.graphs.runner import CUDAGraphs
from quire.scheduler.prefill_budget import PrefillBudget
from tests.executor.graphs.recorded import Compared


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
    observe = PrefillBudget.observe

    def noted(
        self: PrefillBudget,
        decode_rows: int,
        chunks: int,
        prompt_rows: int,
        seconds: float,
        *,
        graphed: bool = False,
    ) -> None:
        if graphed and prompt_rows:
            found.append(prompt_rows)
        observe(self, decode_rows, chunks, prompt_rows, seconds, graphed=graphed)

    monkeypatch.setattr(PrefillBudget, "observe", noted)
    return found


@pytest.fixture
def compared(
    wholes: list[CUDAGraphs], recorded_prompts: list[int], monkeypatch: pytest.MonkeyPatch
) -> Compared:
    return Compared(wholes, recorded_prompts, monkeypatch)
