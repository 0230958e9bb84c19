"""Records the program of a step as kernels: one function for each kind of node."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial

from quire.cache.specs import KVLayout
from quire.executor.graphs.attention.attention_nodes import AttentionRecording
from quire.executor.graphs.attention.head_nodes import HeadRecording
from quire.executor.graphs.attention.pools import LayerPool
from quire.executor.graphs.between import MLXSegment, RecordedNode, memory_of
from quire.executor.graphs.operands import PARTS, UnsupportedNode
from quire.executor.graphs.places import NodeKinds, Place, shown
from quire.executor.graphs.products.low_rank import LowRankRecording
from quire.executor.graphs.products.mixtures import MixtureRecording
from quire.executor.graphs.products.product_nodes import ProductRecording
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.recurrences import StateRecording
from quire.executor.graphs.rows.embed import embed_kernel, gathered_kernel
from quire.executor.graphs.rows.joined import joined_kernel
from quire.executor.graphs.rows.regions import RowKernel
from quire.executor.graphs.rows.small_sums import reduced_kernel, small_product_kernel
from quire.executor.graphs.states import LayerStates
from quire.program.passes import RESHAPES
from quire.program.pieces import at_once
from quire.program.values import Form, Node, Program
from quire.program.wanted_rows import FIELD, WANTED

NODES_A_PIECE = 100
_GENERATED: Mapping[str, Callable[[Program, Node], RowKernel]] = {
    "embed": embed_kernel,
    "Gather": gathered_kernel,
    "Reduce": reduced_kernel,
    "Matmul": small_product_kernel,
    "Concatenate": joined_kernel,
}
"""Functions that generate the only kernel of a node, by its kind."""


class Recording(
    ProductRecording,
    AttentionRecording,
    MixtureRecording,
    StateRecording,
    HeadRecording,
    LowRankRecording,
):
    """Records programs for one number of rows. Each base class records nodes of some kinds.

    Args:
        pools: the pool of each layer that keeps keys and values, by layer.
        layout: says which layer owns the keys that a layer reads.
        states: arrays of each layer's recurrent states, by layer.
        by_mlx: nodes without kernels, which become segments.

    Attributes:
        segments: what MLX computes between two parts of the recorder's kernels, in order.
        recorded: the nodes that kernels compute, in order.
    """

    def __init__(
        self,
        recorder: Recorder,
        pools: Mapping[int, LayerPool],
        layout: KVLayout,
        states: Mapping[int, LayerStates],
        by_mlx: Iterable[Node] = (),
    ) -> None:
        super().__init__(recorder)
        self._by_mlx = frozenset(by_mlx)
        self.segments: list[MLXSegment] = []
        self.recorded: list[RecordedNode] = []
        self._pools, self._layout, self._states = pools, layout, states

    @property
    def kinds(self) -> NodeKinds:
        generated = {kind: partial(self._generate, make) for kind, make in _GENERATED.items()}
        return {**super().kinds, **generated}

    def record(
        self, program: Program, given: Mapping[str, Place], outputs: Sequence[Buffer]
    ) -> None:
        """Record the kernels of a program; see `record_in_pieces`."""
        at_once(self.record_in_pieces(program, given, outputs))

    def record_in_pieces(
        self, program: Program, given: Mapping[str, Place], outputs: Sequence[Buffer]
    ) -> Generator[None, None, None]:
        """Record the kernels of a program, those of `NODES_A_PIECE` nodes in each piece.

        Args:
            given: locations of the program's fields, by name.
            outputs: locations of its outputs.

        Raises:
            UnsupportedNode: there is no kernel for one of its nodes.
        """
        self._kinds = self.kinds
        self._start(program, given, outputs)
        last, done = self._last_reads(program), list[int]()
        for number, node in enumerate(program.nodes):
            if number and number % NODES_A_PIECE == 0:
                yield
            if node in self._by_mlx:
                self._segment(node)
            else:
                before = len(self._recorder.kernels)
                self._record(node)
                if len(self._recorder.kernels) > before:
                    self.recorded.append(self._just_recorded(self._with_ending(node)))
            done += last.get(number, ())
            if node in self._by_mlx:
                continue  # MLX may read its buffers until the next graph begins
            for value in done:
                place = self._places.get(value)
                if place is not None and place.buffer is not None:
                    self._recorder.release(place.buffer)
            done.clear()

    def _last_reads(self, program: Program) -> Mapping[int, list[int]]:
        """For each node by number, return the values that no later node reads."""
        last: dict[int, int] = {}
        for number, node in enumerate(program.nodes):
            for value in (*node.inputs, *node.outputs):
                source = self._uses.source(value)
                last[source] = number
                while (maker := self._uses.makers.get(source)) is not None and maker.kind in PARTS:
                    source = self._uses.source(maker.inputs[0])
                    last[source] = number
        kept = set(self._targets) | set(program.fields.values())
        found: dict[int, list[int]] = {}
        for value, number in last.items():
            if value not in kept:
                found.setdefault(number, []).append(value)
        return found

    def _segment(self, node: Node) -> None:
        """Let MLX compute a node behind the kernels recorded so far."""
        recorder = self._recorder
        if not self.segments or recorder.parts[-1] < len(recorder.kernels):
            recorder.start_part()
            self.segments.append(MLXSegment(self._program))
        segment = self.segments[-1]
        for value in node.reads:
            self._read_by_mlx(segment, value)
        segment.nodes.append(node)
        for value in node.outputs:
            segment.writes[value] = self._written(value, []).address

    def _just_recorded(self, node: Node) -> RecordedNode:
        """Return a node whose kernels have just been recorded."""
        places = {value: self._places.get(value) for value in node.outputs}
        results = {
            value: place.buffer
            for value, place in places.items()
            if place is not None and place.buffer is not None and place.buffer.memory is not None
            if value not in self._elsewhere
        }
        end = len(self._recorder.kernels)
        return RecordedNode(self._program, node, end, alone=self._alone(node), results=results)

    def _alone(self, node: Node) -> MLXSegment | None:
        """Return the segment of one node; None if MLX cannot read its inputs."""
        segment = MLXSegment(self._program)
        try:
            for value in node.reads:
                self._read_by_mlx(segment, value)
        except UnsupportedNode:
            return None
        segment.nodes.append(node)
        return segment

    def _read_by_mlx(self, segment: MLXSegment, value: int) -> None:
        """Let a segment know a value, which may be a view of what a kernel computed."""
        known = {id for each in segment.nodes for id in each.outputs}
        if value in known or value in segment.reads or value in self._program.constants:
            return
        source = self._uses.source(value)
        if source in self._elsewhere:
            raise UnsupportedNode(f"no kernel writes %{value} as MLX reads it")
        if source in self._places and source not in segment.writes:
            segment.reads[value] = memory_of(value, self._places[source].buffer)
            return
        view = self._uses.makers[value]
        for each in view.inputs:
            self._read_by_mlx(segment, each)
        segment.nodes.append(view)

    def _choose_rows(self, node: Node) -> None:
        """Let the kernels recorded next compute all rows, or the wanted ones if a node does."""
        self._recorder.rows = self._recorder.inputs.rows
        shapes = (self._program.values[id].shape for id in node.outputs)
        symbols = {name for s in shapes for n in s if isinstance(n, Form) for name, _ in n.terms}
        if FIELD in self._program.fields and WANTED in symbols:
            self._recorder.rows = self._recorder.inputs.wanted_rows

    def _record(self, node: Node) -> None:
        """Record the kernels of a node.

        Raises:
            UnsupportedNode: the node has no kernel.
        """
        self._choose_rows(node)
        if node in self._endings.values():
            return  # its product's kernel computes it
        if node.name in self._kinds:
            self._kinds[node.name](node)
        elif node.kind not in RESHAPES:
            raise UnsupportedNode(shown(self._program, node))
