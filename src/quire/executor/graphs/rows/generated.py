"""Records kernels that are generated for one node: regions of rows, views, and lookups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from quire.executor.graphs.operands import PARTS, Part, UnsupportedNode, row_width
from quire.executor.graphs.places import NodeKinds, ValueRecording, shown
from quire.executor.graphs.recorder import Buffer
from quire.executor.graphs.rows.regions import Argument, RowKernel, row_kernel
from quire.executor.graphs.source import NotGenerated
from quire.program.values import Node, Program

_READ_PARTS = frozenset(
    {"by_head", "rotate", "convolve", "delta_rule", "recurrence", "state_space"}
)
"""Names of nodes whose kernels can read parts of rows in place."""


class GeneratedRecording(ValueRecording):
    """Records generated kernels, and copies of views that some reader cannot read in place."""

    @property
    def kinds(self) -> NodeKinds:
        views = dict.fromkeys(("Split", "Slice", "Transpose", "Broadcast"), self._copied)
        return {**super().kinds, **views}

    def _generate(self, make: Callable[[Program, Node], RowKernel], node: Node) -> None:
        """Generate and record the kernel of a node.

        Raises:
            UnsupportedNode: there is none.
        """
        try:
            self._generated(make(self._program, node), node)
        except NotGenerated as error:
            raise UnsupportedNode(f"{shown(self._program, node)}: {error}") from error

    def _generated(self, kernel: RowKernel, node: Node, more: Sequence[Buffer] = ()) -> None:
        """Record a generated kernel.

        Args:
            more: what it writes beside the node's outputs.
        """
        recorder, sources = self._recorder, values_of(kernel.arguments)
        reads = self._read([each for each in sources if each not in node.outputs])
        for value in node.outputs:
            self._written(value, reads, layout=kernel.layouts.get(value))
        recorder.add(
            kernel.text,
            kernel.grid(recorder.max_rows),
            kernel.threads,
            arguments=[recorder.rows, *map(self._address, kernel.arguments)],
            reads=reads,
            writes=[*map(self._buffer, node.outputs), *more],
        )

    def _address(self, argument: Argument) -> int:
        if isinstance(argument.source, int):
            return self._place(argument.source).address + argument.offset
        return self._recorder.weight(argument.source) + argument.offset

    def _copied(self, node: Node) -> None:
        """Copy the parts that a view makes, if some reader cannot read parts."""
        for value in node.outputs:
            if self._is_copied(node, value):
                self._generate(row_kernel, replace(node.fused, outputs=(value,)))

    def _is_copied(self, view: Node, value: int) -> bool:
        readers = self._uses.readers(value)
        if not row_width(self._program, value):
            return False
        if view.kind not in PARTS or self._uses.is_output(value):
            return True
        try:
            Part.of(self._program, self._uses, value)
        except UnsupportedNode:
            return bool(readers)
        return any(each.name not in _READ_PARTS for each in readers)


def values_of(arguments: Iterable[Argument]) -> list[int]:
    """Return the values among a kernel's arguments."""
    return [each.source for each in arguments if isinstance(each.source, int)]
