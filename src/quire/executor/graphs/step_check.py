"""Compares a recorded step with the model; where they differ, its kernels with MLX node by node.

A node computes from the same inputs on both sides, so a fault shows in full in the node that has
it, and rounding does not add up over layers. In a deep model rounding may change the last hidden
states more than a wrong kernel would.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import mlx.core as mx

from quire.cache.pools import Pools
from quire.cache.specs import KVLayout
from quire.device.cuda.compiled import compiling_ahead
from quire.device.cuda.driver import DriverError, Graph
from quire.device.device import current_device
from quire.device.ranks import Part, agreed
from quire.executor.agreement import number_of, tolerance_of, whole_error, worst_row
from quire.executor.graphs.between import MLXSegment, RecordedNode, buffered
from quire.executor.graphs.layout import InputLayout
from quire.executor.graphs.places import shown
from quire.executor.graphs.step_graphs import RecordedStep, StepLaunch
from quire.executor.inputs import FlatRows
from quire.executor.kept_states import KeptStates
from quire.program.low_rank import NUMBERS
from quire.program.replay import run_node
from quire.program.trace import HIDDEN
from quire.program.tracing import declared_positions, position_axes
from quire.program.values import Node, Program, bound

log = logging.getLogger("quire.engine")

NODE_TOLERANCE = 5e-2
"""Largest relative error of a row of a node's results. Rounding in 16 bits makes up to 0.01, a lost
head or a wrong expert 0.2 and more."""
_TIMES_ROUNDING = 2
"""How many times as far from the model as from its program, computed by MLX, a graph may be."""
_FEW_ROWS = 64
"""Rows up to which the host does not wait for a node's results."""


class NodeGraphs(NamedTuple):
    """The graphs of single nodes of a step.

    Attributes:
        piece: returns a graph of some of the kernels, for where the pools are at the time.
        launch: launches these graphs in order.
    """

    recorded: RecordedStep
    piece: Callable[[range], Graph]
    launch: StepLaunch


class _Pieces:
    """Runs a step's kernels piece by piece, with what MLX computes between them."""

    def __init__(self, graphs: NodeGraphs) -> None:
        self._piece, self._launch = graphs.piece, graphs.launch
        recorded = graphs.recorded
        self._segments = dict(zip(recorded.recorder.parts, recorded.segments, strict=True))
        self._end = 0
        self._kept: list[Graph] = []
        """Graphs, until they have run."""
        # MLX may compute the first nodes, behind a graph without kernels.
        self._output = self._launched(range(0)) if 0 in self._segments else mx.zeros((0,))

    def run(self, end: int) -> mx.array:
        """Run the kernels up to number `end`, unless they have run. Return the step's output."""
        if self._end < end:
            segment = self._segments.get(self._end)
            self._output = self._launched(range(self._end, end), segment)
            self._end = end
        return self._output

    def _launched(self, kernels: range, segment: MLXSegment | None = None) -> mx.array:
        self._kept.append(self._piece(kernels))
        return self._launch(self._kept[-1], segment)


class StepCheck:
    """A check of the graphs of a step, which several ways compute. Each writes to the pools.

    Args:
        inputs: the step's sequences, all of one format.
        program: as traced.
        logits: computes logits of hidden states, if these are the graph's output.
        part: the rank; all ranks check the same step.
        run_eagerly: runs the model, whose states and tails stay in the end.

    Attributes:
        before: states and tails before the step.
        expected: the model's hidden states.
    """

    def __init__(
        self,
        layout: KVLayout,
        pools: Pools,
        inputs: FlatRows,
        *,
        program: Program,
        logits: Callable[[mx.array], mx.array] | None,
        part: Part,
        run_eagerly: Callable[[], mx.array],
    ) -> None:
        self._layout, self._pools, self._inputs = layout, pools, inputs
        self._program, self._logits, self._part = program, logits, part
        self._tolerance = tolerance_of(inputs.sequences[0].format)
        self._evaluate_pools()
        mx.synchronize()
        self.before = self._states()
        self._run_eagerly = run_eagerly
        self._compile_ahead()
        self.expected = self._computed()
        self._after = self._states()
        self._whole = self._by_node = mx.zeros((0,))

    def difference(
        self, run_graph: Callable[[], mx.array], nodes: Callable[[], NodeGraphs]
    ) -> str | None:
        """Return how the graph's result differs from the model's; None if it agrees.

        Args:
            run_graph: returns the graph's output.
            nodes: returns what runs the kernels node by node; asked where the graph differs.
        """
        problem, error = None, math.inf
        self.before.restore()
        try:
            self._whole = copied(run_graph())
            error = whole_error(self._wanted(self._whole), self._as_output(self.expected))
            log.debug("%d rows: relative error %.2g", len(self.expected), error)
        except (DriverError, RuntimeError) as failure:
            problem = str(failure)
        standing = 0 if problem else 1 + (error <= self._tolerance)
        if (worst := agreed(standing, self._part)) == 1:
            problem = self._unexplained(error, nodes)
        elif worst == 0:
            problem = problem or "another rank's failed"
        self._after.restore()
        return problem

    def run_again(self) -> None:
        """Run the model again: a graph that differs has written other keys and values to blocks."""
        self.before.restore()
        self.expected = self._computed()

    def _compile_ahead(self) -> None:
        """Compile the kernels that the model launches side by side: a run compiles one after the
        other. This one computes nothing, and writes to arrays in the pools' place.
        """
        arrays = self._pools.arrays()
        self._pools.replace(map(mx.stop_gradient, arrays))
        try:
            with compiling_ahead():
                self._run_eagerly()
        finally:
            self._pools.replace(iter(arrays))

    def _computed(self) -> mx.array:
        """Run the model, and compute what it writes to the pools."""
        hidden = self._run_eagerly()
        mx.eval(hidden)
        self._evaluate_pools()
        return hidden

    def _unexplained(self, error: float, nodes: Callable[[], NodeGraphs]) -> str | None:
        """Return how the graph differs but by rounding; None if rounding is all.

        All nodes must agree, and so must the inputs that they share. The graph must compute what
        its kernels do one by one. And it must be about as far from the model as from its own
        program when MLX computes that, or as last bits of the embeddings move that: in a mixture
        they choose other experts, and equal layers choose so again and again.
        """
        self.before.restore()
        try:
            graphs = nodes()
            problem = self._differing_node(graphs)
            problem = problem or self._differing_input(graphs.recorded.recorder.inputs)
        except (DriverError, RuntimeError) as failure:
            problem = str(failure)
        if not agreed(int(problem is None), self._part):
            return problem or "another rank's nodes differ"
        found = self._replayed()
        rounding = whole_error(self._wanted(self._whole), found)
        log.info("%d rows: error %.2g, by rounding %.2g", len(self.expected), error, rounding)
        if (alone := whole_error(self._whole, self._by_node)) > self._tolerance:
            return f"kernels in a graph: relative error {alone:.2g}"
        if agreed(int(by_rounding(error, rounding, self._tolerance)), self._part):
            return None
        moved = whole_error(self._replayed(nudged=True), found)
        log.info("%d rows: last bits of embeddings move the program by %.2g", len(found), moved)
        if by_rounding(error, max(rounding, moved), self._tolerance):
            return None
        return (
            f"the traced program: relative error {error:.2g}, by rounding {rounding:.2g}, "
            f"{moved:.2g} by last bits of embeddings"
        )

    def _replayed(self, *, nudged: bool = False) -> mx.array:
        """Return the graph's output as MLX computes the program; see `replayed`."""
        self.before.restore()
        found = replayed(self._program, self._inputs, nudged=nudged)
        return self._as_output(self._wanted(found))

    def _differing_node(self, graphs_of: NodeGraphs) -> str | None:
        """Run the kernels, and each kind of node that they compute beside MLX once: layers run the
        same kernels with other weights.

        Returns:
            How the node with the largest error differs; None if none is above `NODE_TOLERANCE`.
        """
        recorded, pieces = graphs_of.recorded, _Pieces(graphs_of)
        begin, errors = 0, list[mx.array]()
        seen = dict[tuple[object, ...], RecordedNode]()
        for node in recorded.nodes:
            kernels = recorded.recorder.kernels[begin : node.end]
            kind = tuple((each.source, each.grid) for each in kernels)
            if begin in recorded.recorder.parts or kind not in seen:
                pieces.run(begin)
            if kind not in seen:
                seen[kind] = node
                states = self.before.of_layer(node.layer)
                errors.append(self._error(node, pieces.run(node.end), states))
            begin = node.end
        self._by_node = copied(pieces.run(len(recorded.recorder.kernels)))
        self.before.restore()
        numbers = [number_of(each) for each in errors]
        worst = max(numbers)
        node = list(seen.values())[numbers.index(worst)]
        where = shown(node.program, node.node)
        log.debug("%d rows: relative error %.2g of %s", len(self._by_node), worst, where)
        return None if worst <= NODE_TOLERANCE else f"relative error {worst:.2g} of {where}"

    def _differing_input(self, layout: InputLayout) -> str | None:
        """Return which of the rows' tokens and positions differ from the step's, if any do: nodes
        that read them agree on both sides.
        """
        tokens, rows = self._inputs.tokens, len(self._inputs.tokens)
        pairs = {
            "tokens": (layout.array(layout.tokens)[:rows], tokens),
            "positions": (
                layout.positions_of(rows),
                declared_positions(self._inputs.positions, layout.axes),
            ),
        }
        differing = [
            name
            for name, (found, expected) in pairs.items()
            if not mx.array_equal(found, expected).item()
        ]
        return f"other {' and '.join(differing)}" if differing else None

    def _as_output(self, hidden: mx.array) -> mx.array:
        return hidden if self._logits is None else self._logits(hidden)

    def _wanted(self, rows: mx.array) -> mx.array:
        """Return the rows of a graph's output that the model computes, too."""
        return rows[self._inputs.wanted] if self._inputs.narrowed else rows

    def _states(self) -> KeptStates:
        return KeptStates(self._pools, self._layout, self._inputs.sequences)

    def _evaluate_pools(self) -> None:
        """Compute what MLX has written to the pools."""
        mx.eval(self._pools.arrays(range(len(self._layout.group))))

    def _error(self, node: RecordedNode, output: mx.array, states: list[mx.array]) -> mx.array:
        """Return how far the kernels' results of a node are from MLX's; 0 if MLX cannot know. The
        device computes it before the next graph.

        Args:
            states: states and tails of its layer before it.
        """
        if node.alone is None:
            mx.eval(output)
            return mx.array(0.0)
        rows, layer = len(output), node.layer
        found = buffered(node.program, node.results, output, rows=rows)
        if layer is not None:
            mx.eval(output)
        written = self.before.written(layer)
        self.before.write(layer, states)
        known = node.alone.run(output, rows, self._inputs)
        pairs = _compared(node.node, found, known)
        if layer is not None:
            mx.eval(pairs)
            self._evaluate_pools()
            pairs += zip(written, self.before.written(layer), strict=True)
        error = mx.stack([mx.array(0.0), *(worst_row(*each) for each in pairs)]).max()
        if rows > _FEW_ROWS:  # results take much memory
            mx.eval(output, error)
        else:
            mx.async_eval(output, error)
        return error


def _compared(
    node: Node, found: Mapping[int, mx.array], known: Mapping[int, mx.array]
) -> list[tuple[mx.array, mx.array]]:
    """Return pairs of arrays that are equal but for rounding if a node's results agree."""
    if node.name != "route":
        return [(each, known[value]) for value, each in found.items()]
    # Experts of equal score may replace each other, so logits are compared in order of size, and
    # weights of the experts that both sides chose; and those of a score that rounding changes, so
    # all rows are measured together.
    logits = known[node.inputs[0]].astype(mx.float32)
    chosen, weights = node.outputs
    experts = mx.arange(logits.shape[-1])
    sides = (found, known)
    named = [each[chosen][..., None] == experts for each in sides]  # [T, k, experts]
    ours, theirs = (each.any(axis=1) for each in named)
    pairs = [[mx.sort(mx.where(each, logits, 0)) for each in (ours, theirs)]]
    by_expert = [
        mx.where(own, each[weights][..., None], 0).sum(axis=1)
        for own, each in zip(named, sides, strict=True)
    ]
    pairs.append([mx.where(ours & theirs, each, 0) for each in by_expert])
    return [(a.reshape(1, -1), b.reshape(1, -1)) for a, b in pairs]


def by_rounding(error: float, rounding: float, tolerance: float) -> bool:
    """Return whether rounding explains a graph's error; nothing explains a NaN.

    Args:
        rounding: error of the graph beside its program, computed by MLX.
    """
    return math.isfinite(error) and error <= max(tolerance, _TIMES_ROUNDING * rounding)


def copied(output: mx.array) -> mx.array:
    """Return a copy of a graph's output, which the next graph writes over."""
    copy = mx.contiguous(output + 0)
    mx.eval(copy)
    return copy


def replayed(program: Program, inputs: FlatRows, *, nudged: bool = False) -> mx.array:
    """Return the output of a program as it was traced, computed by MLX node by node.

    Args:
        nudged: whether each element of embeddings, and of hidden states that the program reads, is
            moved to a neighbouring number.
    """
    rows = sum(each.count for each in inputs.sequences)
    sizes = dict.fromkeys(program.symbols, rows)
    known = {id: each.array for id, each in program.constants.items()}
    given = _fields(program, inputs, rows)
    if nudged and HIDDEN in given:
        given[HIDDEN] = _nudged(given[HIDDEN])
    known |= {id: given[name] for name, id in program.fields.items()}
    last = {id: number for number, node in enumerate(program.nodes) for id in node.inputs}
    operations = current_device().operations
    for number, node in enumerate(program.nodes):
        run_node(program, node, known, operations=operations, sizes=sizes, step=inputs)
        if nudged and node.kind == "embed":
            known[node.outputs[0]] = _nudged(known[node.outputs[0]])
        if node.uses_pools:  # before memory of layers adds up
            mx.eval([known[id] for id in node.outputs])
        for id in node.inputs:
            if last[id] == number and id not in program.outputs:
                known.pop(id, None)
    (output,) = (known[id] for id in program.outputs)
    return output


def _nudged(array: mx.array) -> mx.array:
    """Return floats with their last bits drawn: one up, or one down."""
    whole = {2: mx.uint16, 4: mx.uint32}[array.dtype.size]
    up = mx.random.bernoulli(shape=array.shape, key=mx.random.key(0))
    bits = array.view(whole)
    return mx.where(array == 0, bits, mx.where(up, bits + 1, bits - 1)).view(array.dtype)


def _fields(program: Program, inputs: FlatRows, rows: int) -> dict[str, mx.array]:
    """Return a step's inputs by the names that programs have for them."""
    positions = declared_positions(inputs.positions, position_axes(program))
    found = {"tokens": inputs.tokens, "positions": positions}
    if inputs.adapted is not None:
        found[NUMBERS] = inputs.adapted.numbers
    if inputs.hidden is not None:
        found[HIDDEN] = inputs.hidden
    if inputs.media is not None:
        found["media.placed"] = inputs.media.placed
        found |= {f"media.{n}": each for n, each in enumerate(inputs.media.levels)}
    sizes = dict.fromkeys(program.symbols, rows)
    for name in program.fields.keys() - found.keys():
        value = program.values[program.fields[name]]
        found[name] = mx.zeros(bound(value.shape, sizes), value.dtype)
    return found
