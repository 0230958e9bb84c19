"""Makes the instructions of a segment that advance recurrent states."""

from __future__ import annotations

from typing import Any

from quire.cache.specs import KVLayout
from quire.device.recurrence import UNIT_EPS
from quire.executor.segments.places import MULTIPLE, UnsupportedNode, row_shape
from quire.executor.segments.values import SegmentValues
from quire.program.values import Node, Program

_MOST_TAPS = 8


class StateInstructions(SegmentValues):
    """Collects the instructions of convolutions, delta rules and state spaces."""

    def __init__(self, program: Program, layout: KVLayout, native: Any) -> None:
        super().__init__(program, native)
        self._layout = layout
        self._states: list[tuple[int, str]] = []
        self._state_groups: list[int] = []

    def _convolve(self, node: Node) -> None:
        taps, bias = self._weight(node, "taps"), self._weight(node, "bias")
        x = node.input("x")
        if x is None or taps is None:
            raise UnsupportedNode("convolutions by computed taps")
        channels, kernel = taps.shape
        if channels % MULTIPLE or kernel > _MOST_TAPS:
            raise UnsupportedNode("convolutions of this size")
        self._native.convolve(
            self._whole(x),
            self._constant(taps),
            None if bias is None else self._constant(bias),
            self._new(node.outputs[0]),
            *self._state(node, "conv"),
            kernel,
            node.attributes["silu"],
        )

    def _delta_rule(self, node: Node) -> None:
        own, shape = node.attributes, self._delta_shape(node)
        rows = [node.input(name) for name in ("mixed", "steps", "betas")]
        weights = [self._weight(node, name) for name in ("log_rates", "step_biases")]
        if None in rows or any(each is None for each in weights) or shape[-1] % MULTIPLE:
            raise UnsupportedNode("delta rules of this kind")
        by_column = len(self._program.values[node.input("steps")].shape) == 3  # type: ignore[index]
        values = [self._whole(id) for id in rows if id is not None]
        values += [self._constant(each) for each in weights]
        self._native.delta_rule(
            values,
            self._new(node.outputs[0]),
            *self._state(node, "delta"),
            own["key_heads"],
            list(shape),
            by_column,
            UNIT_EPS,
            own["most_correction"],
            own.get("most_forgotten") or 0.0,
        )

    def _state_space(self, node: Node) -> None:
        rows = [node.input(name) for name in ("values", "keys", "queries", "steps")]
        rates = self._weight(node, "rates")
        values, keys, *_ = rows
        if values is None or keys is None or None in rows or rates is None:
            raise UnsupportedNode("state spaces of this kind")
        heads, dim = row_shape(self._program.values[values])
        groups, size = row_shape(self._program.values[keys])
        if size % MULTIPLE:
            raise UnsupportedNode("state spaces of this size")
        numbers = [self._whole(id) for id in rows if id is not None]
        self._native.state_space(
            [*numbers, self._constant(rates)],
            self._new(node.outputs[0]),
            *self._state(node, "state"),
            groups,
            [heads, dim, size],
            rates.ndim == 2,
        )

    def _weight(self, node: Node, name: str) -> Any:
        """Return the weight or constant that a node is passed as a parameter; None if neither."""
        constant = self._program.constants.get(node.input(name))  # type: ignore[arg-type]
        return node.weight(name) if constant is None else constant.array

    def _delta_shape(self, node: Node) -> tuple[int, ...]:
        spec = self._layout.groups[self._layout.group[node.attributes["layer"]]].spec.recurrent
        assert spec is not None, "a node that advances states belongs to a recurrent layer"
        return next(shape for name, shape, _ in spec.arrays if name == "delta")

    def _state(self, node: Node, name: str) -> tuple[int, int]:
        """Return the number of a node's array of states, and of its sequences."""
        layer = node.attributes["layer"]
        group = self._layout.group[layer]
        if group not in self._state_groups:
            self._state_groups.append(group)
        self._states.append((layer, name))
        return len(self._states) - 1, self._state_groups.index(group)
