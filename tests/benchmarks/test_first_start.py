"""The benchmark of first starts: the functions that it wraps are there, and kernels are counted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import first_start as benchmark

from quire.device.cuda import driver


def test_stages_and_kernels_of_a_start_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = list[str]()

    def around(clock: benchmark.Clock, owner: Any, name: str, *_: Any) -> None:
        assert callable(getattr(owner, name))
        watched.append(name)

    monkeypatch.setattr(benchmark.Clock, "around", around)
    monkeypatch.setattr(driver, "compile_source", lambda text, options: (b"binary", "log"))
    monkeypatch.setattr(driver, "_capability", lambda: 90)
    clock = benchmark.Clock()
    benchmark.watch(clock)
    assert driver.Compiler(None).binary("void kernel(int n) {}") == b"binary"
    assert [each["kernel"] for each in clock.units] == ["int n | "]
    assert {"open_model", "warm_up", "_verified", "_record_step"} <= set(watched)
