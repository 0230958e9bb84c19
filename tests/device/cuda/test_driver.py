"""Recording a graph makes the expected calls of the driver; kernels are compiled in threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.device.cuda import driver
from quire.device.cuda.driver import Compiler, DriverError, Graph, Launch


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


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with headers and a card, whose driver loads a binary as its length."""
    monkeypatch.setattr(driver, "_capability", lambda: 90)
    monkeypatch.setattr(driver, "header_folders", lambda: ())
    monkeypatch.setattr(driver, "_loaded", len)


def test_kernels_are_compiled_in_the_background(
    machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, compiled = threading.Event(), list[str]()

    def compiles(text: str, options: list[str]) -> tuple[bytes, str]:
        assert let_go.wait(10)
        compiled.append(text)
        if text == "bad":
            raise DriverError("a kernel does not compile")
        return text.encode(), ""

    monkeypatch.setattr(driver, "compile_source", compiles)
    compiler = Compiler(tmp_path)
    assert not compiler.start(["one", "three"])
    assert not compiler.start(["one", "bad"]), "nothing waits"
    let_go.set()
    assert compiler.functions(["three", "one", "three"]) == [5, 3, 5]
    with pytest.raises(DriverError, match="does not compile"):
        compiler.functions(["bad"])
    assert sorted(compiled) == ["bad", "one", "three"]
    let_go.clear()
    assert Compiler(tmp_path).start(["one", "three"]), "found on disk at once"
    assert compiler.start(["one", "three"])


def test_a_binary_that_is_being_compiled_is_awaited(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = list[int]()

    def compiles(text: str, options: list[str]) -> tuple[bytes, str]:
        compiled.append(threading.get_ident())
        return text.encode(), ""

    monkeypatch.setattr(driver, "compile_source", compiles)
    compiler = Compiler(None)
    compiler.start(["one"])
    assert [compiler.binary(each) for each in ("one", "two")] == [b"one", b"two"]
    assert len(compiled) == 2, "none is compiled twice"
    assert compiled[1] == threading.get_ident() != compiled[0]
