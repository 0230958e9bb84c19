"""Segments: nodes without kernels, which MLX computes between two CUDA graphs of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import mlx.core as mx

from quire.device.device import current_device
from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.recorder import Buffer
from quire.program.passes import KEEPS_ORDER
from quire.program.replay import run_node
from quire.program.values import FUSED, Node, Program, bound


@dataclass(slots=True, eq=False)
class Segment:
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
        program, sizes = self.program, dict.fromkeys(self.program.symbols, rows)
        buffers = [
            _view(program, value, buffer, sizes=sizes) for value, buffer in self.reads.items()
        ]
        known = {id: each.array for id, each in program.constants.items()}
        known |= dict(zip(self.reads, mx.depends(buffers, [graphed]), strict=True))
        operations = current_device().operations
        for node in self.nodes:
            run_node(program, node, known=known, operations=operations, sizes=sizes)
        return [mx.contiguous(known[value]) for value in self.writes]


def _view(program: Program, value: int, buffer: Buffer, sizes: Mapping[str, int]) -> mx.array:
    """Return a value as it stands at the beginning of a buffer."""
    assert buffer.memory is not None, "the buffer is an array"
    kind = program.values[value]
    shape = bound(kind.shape, sizes)
    return buffer.memory.view(kind.dtype)[: prod(shape)].reshape(shape)


def needs_pools(node: Node) -> bool:
    """Whether a node reads or writes pools or states, which MLX does not see between two graphs."""
    nodes = node.arguments if node.kind == FUSED else (node,)
    return any(each.kind in KEEPS_ORDER for each in nodes)


def read_by(node: Node) -> list[int]:
    """Return the values that a node, or the nodes fused into it, read from elsewhere."""
    if node.kind != FUSED:
        return list(node.inputs)
    inside = {id for each in node.arguments for id in each.outputs}
    return list(
        dict.fromkeys(id for each in node.arguments for id in each.inputs if id not in inside)
    )


def memory_of(value: int, buffer: Buffer | None) -> Buffer:
    """Return the buffer of a value that a segment reads.

    Raises:
        UnsupportedNode: its memory is no array of its own.
    """
    if buffer is None or buffer.memory is None:
        raise UnsupportedNode(f"MLX cannot read %{value} between two graphs")
    return buffer
