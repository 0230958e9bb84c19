"""Nodes without kernels, which MLX computes between two CUDA graphs of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import mlx.core as mx

from quire.device.device import current_device
from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.recorder import Buffer
from quire.models.base import ForwardContext
from quire.program.replay import run_node
from quire.program.values import KEEPS_ORDER, Node, Program, bound


@dataclass(slots=True, eq=False)
class MLXSegment:
    """Nodes that MLX computes behind one graph and before the next.

    It is filled while a step is recorded, and does not change afterwards.

    Attributes:
        program: the program of the nodes.
        nodes: in order of computation, with the views through which they read buffers.
        reads: buffers that hold the values which come from graphs, by value.
        writes: addresses of what the next graph reads, by value.
    """

    program: Program
    nodes: list[Node] = field(default_factory=list)
    reads: dict[int, Buffer] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)

    @property
    def targets(self) -> list[int]:
        """Addresses that the results of `compute` are to be copied to."""
        return list(self.writes.values())

    def compute(self, graphed: mx.array, rows: int) -> list[mx.array]:
        """Compute the segment's nodes; return the inputs of the next graph.

        Args:
            graphed: an output of the previous graph. Buffers are read only after it.
            rows: number of rows of the step.
        """
        known = self.run(graphed, rows)
        return [mx.contiguous(known[value]) for value in self.writes]

    def run(
        self, graphed: mx.array, rows: int, step: ForwardContext | None = None
    ) -> dict[int, mx.array]:
        """Compute the segment's nodes; return what they read and compute, by value.

        Args:
            graphed, rows: as for `compute`.
            step: the forward context of nodes that read or write pools.
        """
        program, sizes = self.program, dict.fromkeys(self.program.symbols, rows)
        known = {id: each.array for id, each in program.constants.items()}
        known |= buffered(program, self.reads, graphed, rows=rows)
        operations = current_device().operations
        for node in self.nodes:
            run_node(program, node, known=known, operations=operations, sizes=sizes, step=step)
        return known


def buffered(
    program: Program, buffers: Mapping[int, Buffer], graphed: mx.array, rows: int
) -> dict[int, mx.array]:
    """Return values as they stand in buffers behind a graph.

    Args:
        graphed, rows: as for `MLXSegment.compute`.
    """
    sizes = dict.fromkeys(program.symbols, rows)
    views = [_view(program, value, buffer, sizes=sizes) for value, buffer in buffers.items()]
    return dict(zip(buffers, mx.depends(views, [graphed]), strict=True)) if views else {}


def _view(program: Program, value: int, buffer: Buffer, sizes: Mapping[str, int]) -> mx.array:
    """Return a value as it stands at the beginning of a buffer."""
    assert buffer.memory is not None, "the buffer is an array"
    kind = program.values[value]
    shape = bound(kind.shape, sizes)
    return buffer.memory.view(kind.dtype)[: prod(shape)].reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedNode:
    """A node that kernels compute, with what is needed to compute it by MLX beside them.

    Attributes:
        program, node: the node, and its program.
        end: number of kernels recorded up to its last one.
        alone: the segment of this node alone; None if MLX cannot read its inputs.
        results: buffers of its outputs, by value.
    """

    program: Program
    node: Node
    end: int
    alone: MLXSegment | None
    results: Mapping[int, Buffer]

    @property
    def layer(self) -> int | None:
        """Layer whose keys or states it reads and writes; None if it uses none."""
        own = (each for each in self.node.parts if each.kind in KEEPS_ORDER)
        return next((each.attributes["layer"] for each in own), None)


def memory_of(value: int, buffer: Buffer | None) -> Buffer:
    """Return the buffer of a value that a segment reads.

    Raises:
        UnsupportedNode: its memory is no array of its own.
    """
    if buffer is None or buffer.memory is None:
        raise UnsupportedNode(f"MLX cannot read %{value} between two graphs")
    return buffer
