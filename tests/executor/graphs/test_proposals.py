"""Choosing among the library's proposals for a product: by their times, once on a machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from quire.device import verified
from quire.device.cuda.cublas import LibraryProduct
from quire.device.cuda.driver import DriverError
from quire.device.verified import VerifiedKernels
from quire.executor.graphs.products import proposals
from quire.executor.graphs.products.proposals import Proposals
from quire.executor.graphs.recorder import Kernel
from tests.support.emulated_card import EmulatedGraph
from tests.support.emulated_cublas import VERSION, EmulatedCublas, emulate_cublas
from tests.support.emulated_steps import memory_of

ONE = 1, 1, 1
WIDE, NARROW = LibraryProduct(128, 64, 256), LibraryProduct(128, 64, 32, biased=True)
X, Y = 1 << 12, 1 << 13
STEP = [
    Kernel("a norm", ONE, 32, 0, arguments=(X,)),
    *(Kernel(WIDE, ONE, 1, 0, arguments=(X, 16 * layer, Y), after=(layer,)) for layer in range(20)),
    Kernel(NARROW, ONE, 1, 0, arguments=(X, 7, Y, 9), after=(20,)),
]
"""Twenty layers of one product, and another one."""


class Clock:
    """Times graphs by a list of microseconds for each shape, and keeps the graphs."""

    def __init__(self, times: Mapping[int, list[float]]) -> None:
        self._times = times
        self.timed: list[EmulatedGraph] = []

    def __call__(self, graph: EmulatedGraph, times: int) -> float:
        self.timed.append(graph)
        product = graph.launches[0].function
        assert isinstance(product, LibraryProduct)
        return self._times[product.outputs][product.proposal]


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EmulatedCublas:
    monkeypatch.setattr(verified, "verified_kernels", lambda: VerifiedKernels(tmp_path, "1"))
    monkeypatch.setattr(proposals, "Graph", EmulatedGraph)
    library = emulate_cublas(monkeypatch)
    library.algorithms = 3
    return library


def chosen(clock: Clock, monkeypatch: pytest.MonkeyPatch, version: int = VERSION) -> list[Kernel]:
    monkeypatch.setattr(proposals, "graph_microseconds", clock)
    return Proposals(version, lambda array: memory_of(array).ctypes.data).chosen(STEP)


def numbers(kernels: list[Kernel]) -> list[int]:
    """Return the proposals of the library's products, in order."""
    found = [each.source for each in kernels]
    return [each.proposal for each in found if isinstance(each, LibraryProduct)]


def test_each_product_gets_the_quickest_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({256: [9.0, 8.0, 8.5], 32: [4.0, 4.5, 3.0]})
    kernels = chosen(clock, monkeypatch)
    assert numbers(kernels) == [1] * 20 + [2]
    places = [(each.arguments, each.after) for each in STEP]
    assert [(each.arguments, each.after) for each in kernels] == places
    assert kernels[0] is STEP[0]


def test_graphs_that_are_timed_read_the_weights_of_several_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And none of the step's own rows, which may be in use."""
    clock = Clock({256: [9.0, 8.0, 8.5], 32: [4.0, 4.5, 3.0]})
    chosen(clock, monkeypatch)
    wide = next(each for each in clock.timed if len(each.launches) > 1)
    assert [each.arguments[1] for each in wide.launches] == [16 * layer for layer in range(4)]
    assert [each.after for each in wide.launches] == [(), *((n,) for n in range(3))]
    used = {each.arguments[n] for graph in clock.timed for each in graph.launches for n in (0, 2)}
    assert not used & {X, Y}
    assert clock.timed[-1].launches[0].arguments[1::2] == (7, 9), "with its bias"


def test_a_proposal_that_is_hardly_quicker_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({256: [9.0, 8.9, 8.95], 32: [4.0, 4.5, 4.2]})
    assert numbers(chosen(clock, monkeypatch)) == [0] * 21


def test_a_choice_is_kept_for_a_version_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(Clock({256: [9.0, 8.0, 8.5], 32: [4.0, 4.5, 3.0]}), monkeypatch)
    later = Clock({256: [1.0, 2.0, 3.0], 32: [1.0, 2.0, 3.0]})
    assert numbers(chosen(later, monkeypatch)) == [1] * 20 + [2]
    assert not later.timed
    assert numbers(chosen(later, monkeypatch, version=VERSION + 1)) == [0] * 21


def test_the_first_proposal_is_used_if_none_can_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(graph: EmulatedGraph, times: int) -> float:
        raise DriverError("cuGraphLaunch: error 2")

    monkeypatch.setattr(proposals, "graph_microseconds", refuses)
    address = Proposals(VERSION, lambda array: memory_of(array).ctypes.data)
    assert numbers(address.chosen(STEP)) == [0] * 21
