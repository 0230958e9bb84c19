"""Products by cuBLASLt: what the library is told of them, and how graphs hold them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.device.cuda import cublas, driver
from quire.device.cuda.cublas import LibraryProduct, library_version
from quire.device.cuda.driver import Compiler, DriverError, Graph, Launch
from tests.support.emulated_cublas import VERSION, emulate_cublas
from tests.support.emulated_steps import memory_of


@pytest.mark.parametrize("biased", [False, True])
def test_the_library_multiplies_rows_by_a_matrix(
    biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = emulate_cublas(monkeypatch)
    x, weight = (
        mx.random.normal((n, 64), key=mx.random.key(n)).astype(mx.bfloat16) for n in (24, 40)
    )
    y, bias = np.zeros((24, 40), np.uint16), 10 * mx.arange(40).astype(mx.bfloat16)
    product = LibraryProduct(rows=24, inputs=64, outputs=40, biased=biased)
    addresses = *(memory_of(each).ctypes.data for each in (x, weight)), y.ctypes.data
    for _ in range(2):
        product.enqueue(0, (*addresses, *[memory_of(bias).ctypes.data] * biased))
    expected = x.astype(mx.float32) @ weight.astype(mx.float32).T + bias * biased
    expected = expected.astype(mx.bfloat16)
    found = mx.array(y).view(mx.bfloat16).astype(mx.float32)
    assert mx.allclose(found, expected.astype(mx.float32), rtol=2e-2, atol=1e-2)
    assert len(library.preferences) == 1, "the algorithm is chosen once"
    assert library.preferences[0] == {1: 0, 3: 0, **dict.fromkeys((5, 6, 7, 8), 16)}
    assert library_version() == VERSION


def test_a_product_is_computed_by_the_proposal_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = emulate_cublas(monkeypatch)
    library.algorithms = 9
    x, weight, y = (np.zeros(shape, np.uint16) for shape in ((8, 64), (16, 64), (8, 16)))
    proposals = LibraryProduct(8, 64, 16, proposal=2).proposals()
    assert len(proposals) == 6
    assert len(library.preferences) == 1, "all proposals have one plan"
    for each in (proposals[4], proposals[1]):
        each.enqueue(0, tuple(memory.ctypes.data for memory in (x, weight, y)))
    assert library.used == [4, 1]


def test_a_product_without_an_algorithm_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    library, product = emulate_cublas(monkeypatch), LibraryProduct(8, 64, 64)
    library.algorithms = 0
    assert not product.is_supported
    with pytest.raises(DriverError, match="no algorithm"):
        product.enqueue(0, (1, 2, 3))
    library.algorithms = 1
    assert product.is_supported


def test_a_missing_library_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise DriverError("libcublasLt cannot be found")

    monkeypatch.setattr(cublas, "_library", missing)
    cublas._plan.cache_clear()
    assert library_version() is None
    assert not LibraryProduct(16, 64, 64).is_supported


class Driver:
    """Keeps the calls that make a graph, and each edge's nodes and type; all succeed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.edges: list[tuple[int, int, int]] = []
        self._nodes = 0

    def cuGraphAddKernelNode_v2(self, node: Any, *_: Any) -> int:
        self.calls.append("kernel")
        self._nodes += 1
        node._obj.value = self._nodes
        return 0

    def cuGraphAddChildGraphNode(self, node: Any, *_: Any) -> int:
        self.calls.append("child")
        self._nodes += 1
        node._obj.value = self._nodes
        return 0

    def cuGraphAddDependencies_v2(
        self, _: Any, sources: Any, targets: Any, data: Any, *__: Any
    ) -> int:
        self.edges += zip(sources, targets, (each.type for each in data), strict=True)
        return 0

    def cuStreamCreate(self, stream: Any, _: Any) -> int:
        stream._obj.value = 5
        return 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def called(*_: Any) -> int:
            self.calls.append(name)
            return 0

        return called


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver of a card whose kernels may start early."""
    fake = Driver()
    monkeypatch.setattr(driver, "_driver", lambda: fake)
    monkeypatch.setattr(driver, "_capability", lambda: 90)
    driver._capturing_stream.cache_clear()
    return fake


class Work(driver.LibraryFunction):
    """Calls the driver as a library would."""

    def __init__(self, fake: Driver) -> None:
        self._fake = fake

    def enqueue(self, stream: int, arguments: tuple[int, ...]) -> None:
        if not arguments:
            raise DriverError("no arguments")
        self._fake.calls.append(f"{stream}: {arguments}")


def test_a_graph_holds_what_a_library_launches_as_a_child(fake: Driver) -> None:
    one = (1, 1, 1)
    launches = [
        Launch(7, one, 32, 0, (), ()),
        Launch(7, one, 32, 0, (), (0,)),
        Launch(Work(fake), one, 1, 0, (3, 4), (1,)),
        Launch(7, one, 32, 0, (), (2,)),
    ]
    Graph(launches)
    captured = ["cuStreamBeginCapture_v2", "5: (3, 4)", "cuStreamEndCapture", "child"]
    begin = fake.calls.index(captured[0])
    assert fake.calls[begin : begin + 5] == [*captured, "cuGraphDestroy"]
    assert fake.edges == [(1, 2, 0), (2, 3, 0), (3, 4, 0)], "no kernel starts early"
    fake.edges.clear()
    Graph(launches[:2])
    assert [kind for *_, kind in fake.edges] == [1]


def test_a_stream_stops_capturing_when_a_library_refuses(fake: Driver) -> None:
    with pytest.raises(DriverError, match="no arguments"):
        Graph([Launch(Work(fake), (1, 1, 1), 1, 0, (), ())])
    assert "cuStreamEndCapture" in fake.calls
    assert "child" not in fake.calls


def test_libraries_need_no_compiler(monkeypatch: pytest.MonkeyPatch, fake: Driver) -> None:
    monkeypatch.setattr(driver, "header_folders", lambda: ())
    product, compiler = LibraryProduct(8, 64, 64), Compiler(None)
    assert compiler.start([product])
    assert compiler.functions([product]) == [product]


def test_the_librarys_result_has_its_size() -> None:
    assert ctypes.sizeof(cublas._Algorithm) == 96
