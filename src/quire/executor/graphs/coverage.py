"""Measures how much of a program can be recorded as kernels, and why the rest cannot."""

from __future__ import annotations

from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.recording import Recording
from quire.program.passes import RESHAPES
from quire.program.values import Node, Program


class Survey(Recording):
    """A recording that continues past nodes without kernels and counts them.

    Attributes:
        nodes: number of the program's nodes that compute something.
        unsupported: its nodes without kernels, with the reason.
    """

    def _begin(self, program: Program) -> None:
        super()._begin(program)
        self.nodes = 0
        self.unsupported: list[tuple[Node, str]] = []

    def _record(self, node: Node) -> None:
        if node.kind in RESHAPES:
            return
        self.nodes += 1
        try:
            super()._record(node)
        except UnsupportedNode as error:
            self.unsupported.append((node, str(error)))
            for value in node.outputs:
                if value not in self._places:
                    self._written(value, [])
