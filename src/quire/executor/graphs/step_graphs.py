"""A recorded step, and the CUDA graphs that are made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx

from quire.device.cuda.driver import Graph, Launch
from quire.executor.graphs.between import Segment
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
    following: Sequence[tuple[Segment, Graph]] = ()


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Kernels of a step, with the pool addresses that they were recorded for.

    A step is recorded once. When pools grow and move, a graph is made of the same kernels with new
    addresses.

    Attributes:
        started: when it was recorded, by `time.perf_counter`.
    """

    recorder: Recorder
    addresses: Addresses
    segments: Sequence[Segment]
    started: float

    @property
    def sources(self) -> list[str]:
        """The kernels' sources, in order."""
        return [each.source for each in self.recorder.kernels]

    def graphs(self, addresses: Addresses, functions: Sequence[int]) -> StepGraphs:
        """Return the graphs of the step for pools at `addresses`, of compiled kernels."""
        parts, kept = self.launches(addresses, functions)
        first, *others = (Graph(part, kept) for part in parts)
        return StepGraphs(first, list(zip(self.segments, others, strict=True)))

    def launches(
        self, addresses: Addresses, functions: Sequence[int]
    ) -> tuple[list[list[Launch]], list[mx.array]]:
        """Return each graph's launches for pools at `addresses`, and the arrays that they need."""
        moved = dict(zip(self.addresses, addresses, strict=True))
        kept = self.recorder.kept
        if addresses != self.addresses:
            tables, arrays = self.recorder.moved_tables(moved)
            moved, kept = {**moved, **tables}, [*kept, *arrays]
        recorded = self.recorder.kernels
        ends = [*self.recorder.parts, len(recorded)]
        return [
            launches(recorded[first:end], functions[first:end], moved, first=first)
            for first, end in pairwise([0, *ends])
        ], kept
