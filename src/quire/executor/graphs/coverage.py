"""Measures how much of a program can be recorded as kernels, and why the rest cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quire.cache.specs import KVLayout
from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.pools import LayerPool
from quire.executor.graphs.recorder import Recorder
from quire.executor.graphs.recording import Recording
from quire.executor.graphs.states import LayerStates
from quire.program.passes import RESHAPES
from quire.program.values import Node


class Survey(Recording):
    """A recording that continues past nodes without kernels and counts them.

    Attributes:
        nodes: number of nodes that compute something.
        unsupported: the nodes without kernels, with the reason.
    """

    def __init__(
        self,
        recorder: Recorder,
        pools: Mapping[int, LayerPool],
        layout: KVLayout,
        states: Mapping[int, LayerStates],
        by_mlx: Iterable[Node] = (),
    ) -> None:
        super().__init__(recorder, pools, layout, states=states, by_mlx=by_mlx)
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
