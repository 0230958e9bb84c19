"""Recording a graph makes the expected calls of the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from quire.device.cuda import driver
from quire.device.cuda.driver import Graph, Launch


class Driver:
    """Keeps how much shared memory functions are allowed; everything else succeeds."""

    def __init__(self) -> None:
        self.allowed: dict[int, int] = {}

    def cuFuncGetAttribute(self, value: Any, _: int, function: ctypes.c_void_p) -> int:
        value._obj.value = self.allowed.get(function.value or 0, 48 << 10)
        return 0

    def cuFuncSetAttribute(self, function: ctypes.c_void_p, _: int, value: int) -> int:
        self.allowed[function.value or 0] = value
        return 0

    def cuGraphAddKernelNode_v2(self, node: Any, *_: Any) -> int:
        node._obj.value = 1
        return 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


def test_a_function_keeps_the_most_shared_memory_that_it_was_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Driver()
    monkeypatch.setattr(driver, "_driver", lambda: fake)

    def graph(*shared: int) -> Graph:
        return Graph([Launch(7, (1, 1, 1), 32, size, (), ()) for size in shared])

    graph(40_000)
    assert not fake.allowed, "no need to ask"
    graph(60_000, 100_000, 70_000)
    graph(80_000)
    assert fake.allowed == {7: 100_000}
