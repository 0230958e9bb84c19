"""A recorded step, and the CUDA graphs that are made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx

from quire.device.cuda.driver import Function, Graph, Launch, Source
from quire.device.cuda.extension import Extension
from quire.executor.graphs.between import MLXSegment, RecordedNode
from quire.executor.graphs.recorder import Recorder, launches

Addresses = tuple[int, ...]
"""Addresses of the pools' arrays and of the factors of adapters."""


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """A step: one graph, or several with a segment between each two.

    Attributes:
        first: the first graph.
        following: each segment, and the graph behind it.
    """

    first: Graph
    following: Sequence[tuple[MLXSegment, Graph]] = ()


class StepLaunch:
    """Launches the graphs of one step, in order.

    Args:
        workspace: the buffer that they write their output to.
        rows: of the step.
        first: what is copied before the first graph, by the arguments of `Extension.replay`.
        before: a graph that completes the step's inputs; it runs before those of the step.
    """

    def __init__(
        self,
        extension: Extension,
        workspace: mx.array,
        rows: int,
        first: Mapping[str, Any],
        before: Graph | None = None,
    ) -> None:
        self._replay = partial(extension.replay, rows=rows)
        self._workspace, self._rows, self._first = workspace, rows, first
        self._before = before
        self._output: mx.array | None = None

    def run(self, graphs: StepGraphs) -> mx.array:
        """Launch all graphs of the step; return its output."""
        if self._before is not None:
            self(self._before)
        output = self(graphs.first)
        for segment, graph in graphs.following:
            output = self(graph, segment)
        return output

    def __call__(self, graph: Graph, segment: MLXSegment | None = None) -> mx.array:
        """Launch a graph, behind what MLX computes for it; return the step's output.

        MLX launches it when the output is computed, after the graphs before it.
        """
        given = self._first if self._output is None else {"inputs": [], "targets": []}
        if segment is not None:
            assert self._output is not None, "a graph comes first"
            found = segment.compute(self._output, self._rows)
            given = {"inputs": found, "targets": segment.targets}
        workspace = self._workspace
        if self._output is not None:
            (workspace,) = mx.depends([workspace], [self._output])
        self._output = self._replay(graph=graph.handle, workspace=workspace, **given)
        return self._output


@dataclass(slots=True, eq=False)
class RecordedStep:
    """Kernels of a step, with the pool addresses that they were recorded for.

    A step is recorded once. When pools grow and move, a graph is made of the same kernels with new
    addresses.

    Attributes:
        segments: see `Recording`.
        nodes: those that kernels compute, in order.
        started: when it was recorded, by `time.perf_counter`.
        functions: the compiled kernels, in order; empty before they are.
        bound: the graphs made last, with their addresses; None before the first ones.
    """

    recorder: Recorder
    addresses: Addresses
    segments: Sequence[MLXSegment]
    nodes: Sequence[RecordedNode]
    started: float
    functions: Sequence[Function] = ()
    bound: tuple[Addresses, StepGraphs] | None = None

    @property
    def sources(self) -> list[Source]:
        """The kernels' sources, in order."""
        return [each.source for each in self.recorder.kernels]

    def graphs(self, addresses: Addresses) -> StepGraphs:
        """Return the graphs of the step for pools at `addresses`, whose kernels are compiled."""
        if self.bound is None or self.bound[0] != addresses:
            parts, kept = self.launches(addresses)
            first, *others = (Graph(part, kept) for part in parts)
            graphs = StepGraphs(first, list(zip(self.segments, others, strict=True)))
            self.bound = addresses, graphs
        return self.bound[1]

    def piece(self, kernels: range, addresses: Addresses) -> Graph:
        """Return some of the step's kernels, which follow each other, as a graph."""
        moved, kept = self._moved(addresses)
        return Graph(self._launches(kernels, moved), kept)

    def launches(self, addresses: Addresses) -> tuple[list[list[Launch]], list[mx.array]]:
        """Return each graph's launches for pools at `addresses`, and the arrays that they need."""
        moved, kept = self._moved(addresses)
        ends = [0, *self.recorder.parts, len(self.recorder.kernels)]
        return [self._launches(range(*each), moved) for each in pairwise(ends)], kept

    def _moved(self, addresses: Addresses) -> tuple[Mapping[int, int], list[mx.array]]:
        """Return current addresses by those at recording, and the arrays that graphs need."""
        moved = dict(zip(self.addresses, addresses, strict=True))
        if addresses == self.addresses:
            return moved, self.recorder.kept
        tables, arrays = self.recorder.moved_tables(moved)
        return {**moved, **tables}, [*self.recorder.kept, *arrays]

    def _launches(self, kernels: range, moved: Mapping[int, int]) -> list[Launch]:
        part = slice(kernels.start, kernels.stop)
        own = self.recorder.kernels[part]
        return launches(own, self.functions[part], moved, first=kernels.start)
