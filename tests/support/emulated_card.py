"""A card without a card: recorded steps whose kernels run one after the other on the CPU.

The model itself goes layer by layer as on any CPU; what is recorded beside it is what a GPU runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest

from quire.device.cuda import boxes
from quire.device.cuda.driver import Card, Launch, LibraryFunction, Source
from quire.device.cuda.inboxes import Inboxes, inbox_bytes
from quire.device.device import CUDA, current_device
from quire.device.ranks import Part
from quire.device.verified import VerifiedKernels
from quire.engine import invariance
from quire.executor import agreement
from quire.executor.graphs import (
    encoders,
    graph_cache,
    opening,
    placing,
    step_check,
    step_graphs,
    verifications,
)
from quire.executor.graphs.attention import coding_check, formats
from quire.executor.graphs.products import proposals
from quire.executor.graphs.recorder import Kernel
from tests.support.emulated_steps import launch, memory_of
from tests.support.lockstep import Lockstep
from tests.support.new_memory import fill_new_memory
from tests.support.precise import PreciseOperations

SMALL = Card(multiprocessors=4, shared=227 << 10)
"""A card with an H200's shared memory and few thread blocks at a time."""
_MLX_ALIGNED = 8
"""Bytes, of MLX's arrays on a CPU."""
_TOLERANCE = 2e-2
_MOST_RANKS = 4
_WAITS = "received("
"""Text in the source of every kernel that waits for other ranks."""


class EmulatedCompiler:
    """A function is the number of its source."""

    def __init__(self) -> None:
        self.sources: list[Source] = []

    def start(self, sources: Sequence[Source]) -> bool:
        """Return whether all sources are compiled."""
        return True

    def functions(self, sources: Sequence[Source]) -> list[int]:
        self.sources += [each for each in sources if each not in self.sources]
        return [self.sources.index(each) for each in sources]


@dataclass
class EmulatedGraph:
    """Launches, found by their handle; all that were ever made are kept."""

    launches: Sequence[Launch]
    kept: Sequence[mx.array] = ()
    made: ClassVar[list[EmulatedGraph]] = []

    def __post_init__(self) -> None:
        self.handle = len(self.made)
        self.made.append(self)


class EmulatedExtension:
    """Replays when it is asked to, not when its output is computed.

    Attributes:
        meet: lets the other ranks run until each of them has begun the same exchange.
        spoil: called before each step.
    """

    def __init__(self, compiler: EmulatedCompiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(_MOST_RANKS, initializer=_own_stream)
        self.meet: Callable[[], object] = lambda: None
        self.spoil: Callable[[], object] = lambda: None

    def pointer(self, array: mx.array) -> int:
        return int(memory_of(array).ctypes.data)

    def replay(
        self,
        graph: int,
        inputs: Sequence[mx.array],
        targets: Sequence[int],
        workspace: mx.array,
        rows: int,
        numbers: bytes = b"",
        numbers_target: int = 0,
    ) -> mx.array:
        mx.synchronize()
        given = [memory_of(each).copy() for each in inputs]  # another graph may have written one
        if numbers:  # a step's further graphs read what the first one has written
            self.spoil()
        for memory, target in zip(given, targets, strict=True):
            ctypes.memmove(target, memory.ctypes.data, memory.nbytes)
        ctypes.memmove(numbers_target, numbers, len(numbers))
        for each in EmulatedGraph.made[graph].launches:
            assert isinstance(each.function, int), "the compiler numbers all functions"
            source = self._compiler.sources[each.function]
            if isinstance(source, LibraryFunction):
                source.enqueue(0, each.arguments)
                continue
            kernel = Kernel(source, each.grid, each.block, each.shared, each.arguments, each.after)
            if _WAITS not in source:
                launch(kernel, _MLX_ALIGNED)
                continue
            exchange = self._threads.submit(launch, kernel, _MLX_ALIGNED)
            self.meet()
            exchange.result()
        return mx.array(memory_of(workspace)).view(workspace.dtype)[:rows]

    def finish(self) -> None:
        """Wait until no kernel runs. The last exchange of a rank may end after the test's steps,
        and uses memory that the test frees.
        """
        self._threads.shutdown()


class _CUDA:
    """Stands in for the CUDA device."""

    kernel_language = "cuda"
    kernels = None

    def free_memory(self) -> int:
        return current_device().free_memory()


def _own_stream() -> None:
    mx.set_default_stream(mx.new_stream(mx.cpu))


def emulate_ranks(
    monkeypatch: pytest.MonkeyPatch, extension: EmulatedExtension, ranks: Lockstep
) -> None:
    """Let ranks that run in lockstep reach each other's memory on emulated cards."""
    size = ranks.part.size
    memory = [np.zeros(inbox_bytes(size), np.uint8) for _ in range(size)]
    addresses = tuple(each.ctypes.data for each in memory)
    inboxes = [Inboxes(Part(rank, size), addresses) for rank in range(size)]

    def opened(part: Part) -> Inboxes:
        assert memory[part.rank].nbytes, "it is kept as long as this function"
        return inboxes[part.rank]

    monkeypatch.setattr(opening, "verified_inboxes", opened)
    monkeypatch.setattr(extension, "meet", ranks.meet)


def emulate_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels copy boxes of matrices anywhere: the emulation of `copy_box` reads no map."""
    monkeypatch.setattr(boxes, "encoded", lambda columns, rows: np.zeros(32, np.uint32))
    monkeypatch.setattr(boxes, "reaches", lambda address: True)


def emulate_card(monkeypatch: pytest.MonkeyPatch) -> EmulatedExtension:
    """Let engines opened from now on graph their steps, verified against precise ones."""
    compiler = EmulatedCompiler()
    extension = EmulatedExtension(compiler)
    monkeypatch.setattr(current_device(), "operations", PreciseOperations())
    monkeypatch.setattr(current_device(), "deferred_updates", CUDA.deferred_updates)
    extension.spoil = fill_new_memory(monkeypatch).spoil
    monkeypatch.setattr(agreement, "_TOLERANCE", _TOLERANCE)
    monkeypatch.setattr(step_check, "NODE_TOLERANCE", _TOLERANCE)
    for module in (opening, invariance):
        monkeypatch.setattr(module, "current_device", _CUDA)
    for module in (graph_cache, encoders):
        monkeypatch.setattr(module, "card", lambda: SMALL)
    monkeypatch.setattr(encoders, "takes_less", lambda a, b: True)
    for module in (graph_cache, formats, encoders):
        monkeypatch.setattr(module, "compiler", lambda: compiler)
    monkeypatch.setattr(opening, "load_extension", lambda: extension)
    for module in (verifications, formats):
        monkeypatch.setattr(module, "verified_kernels", lambda: VerifiedKernels(None, ""))
    for module in (step_graphs, coding_check, placing, proposals):
        monkeypatch.setattr(module, "Graph", EmulatedGraph)
    monkeypatch.setattr(proposals, "graph_microseconds", lambda graph, times: 1.0)
    emulate_boxes(monkeypatch)
    return extension
