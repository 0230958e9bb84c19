"""The benchmark of lone steps: it records a step of a model with recurrent states."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import lone_step as benchmark

from quire.cache.specs import KVLayout
from tests.executor.graphs.recorded import opened
from tests.support.emulated_card import emulate_card
from tests.support.emulated_metal import why_not
from tests.support.grown import grown


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_step_of_states_and_keys_has_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = opened(grown("qwen3_5"))

    def called(name: str, target: ctypes.c_uint64, data: bytes, size: ctypes.c_size_t) -> None:
        assert name == "cuMemcpyHtoD_v2"
        ctypes.memmove(target.value or 0, data, size.value)

    def nothing(*settings: Any) -> None:
        """The device is open."""

    emulate_card(monkeypatch)
    monkeypatch.setattr(benchmark, "open_device", nothing)
    monkeypatch.setattr(benchmark, "open_model", lambda folder: loaded)
    monkeypatch.setattr(benchmark, "driver_call", called)
    step = benchmark.LoneStep("folder", rows=4)
    groups = KVLayout.of(loaded.model.layout).groups
    (states,) = (each.index for each in groups if each.spec.recurrent is not None)
    at = step.cache.inputs(4).states(states)
    fields = (at.firsts, at.counts, at.sources)
    found = [np.ctypeslib.as_array((ctypes.c_int * 4).from_address(each)) for each in fields]
    assert [each.tolist() for each in found] == [[0, 1, 2, 3], [1] * 4, [0, 1, 2, 3]]
    assert any("stays" in str(each.kernel.source) for each in step.parts), "states are advanced"
