"""Makes the instructions of one segment from nodes of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx

from quire.cache.specs import KVLayout
from quire.device.cpu.matrices import Matrices
from quire.device.weights import GatedExperts, Matrix
from quire.executor.segments.places import (
    MULTIPLE,
    Place,
    UnsupportedNode,
    fixed,
    joined_axes,
    row_shape,
    sliced,
    split,
    transposed,
)
from quire.executor.segments.states import StateInstructions
from quire.executor.segments.tables import TableInstructions
from quire.program.passes import PRODUCTS, RESHAPES
from quire.program.values import Node, Program
from quire.program.wanted_rows import WANTED_ROWS

_GATES = {"silu": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh", "gelu_new": "gelu_pytorch_tanh"}
UNARY = frozenset(
    {
        *("Abs", "Cos", "Erf", "Exp", "Expm1", "Log1p", "Negative"),
        *("Rsqrt", "Sigmoid", "Sin", "Sqrt", "Square", "Tanh"),
    }
)
BINARY = frozenset(["Add", "Divide", "LogAddExp", "Maximum", "Minimum", "Multiply", "Subtract"])
_ANY = (mx.float32, mx.int32)
_READ_AS = {
    "embed": (mx.int32,),
    "AsType": (mx.int32,),
    **dict.fromkeys(("experts", "add_low_rank", "Concatenate", *RESHAPES), _ANY),
}
"""Types that instructions read, where they are not float32."""
_MAKES = {
    "best": (mx.int32,),
    **dict.fromkeys(("likeliest", "route", "embed", "Concatenate", *RESHAPES), _ANY),
}
"""Likewise, what they compute."""


@dataclass(frozen=True)
class Segment:
    """A built segment.

    Attributes:
        native: the extension's segment.
        given, outputs: ids of the program's values, in its order.
        layers: layers whose pools it reads, in the order of its pools.
        groups: KV groups whose rows it needs, in order.
        states: layers and names of the recurrent states that it advances, in order.
        state_groups: groups of recurrent layers whose rows it needs, in order.
        wanted: whether its rows are the wanted ones of the step.
    """

    native: Any
    given: tuple[int, ...]
    outputs: tuple[int, ...]
    layers: tuple[int, ...]
    groups: tuple[int, ...]
    states: tuple[tuple[int, str], ...]
    state_groups: tuple[int, ...]
    wanted: bool

    def compute(self, given: list[mx.array]) -> list[mx.array]:
        """Return the outputs of a segment that reads no pools."""
        found: list[mx.array] = self.native.run(given)
        return found


class SegmentBuilder(StateInstructions, TableInstructions):
    """Collects instructions for nodes, in order. A node that is refused leaves no instruction.

    Attributes:
        computed: ids of the values that nodes of the segment compute.
    """

    def __init__(self, program: Program, layout: KVLayout, ops: Any) -> None:
        super().__init__(program, layout, ops.Segment())
        self._matrices = Matrices(ops)
        self._layers: list[int] = []
        self._groups: list[int] = []
        self.computed: set[int] = set()
        self._kinds: dict[str, Callable[[Node], None]] = {
            **dict.fromkeys(PRODUCTS, lambda node: self.add_products([node])),
            "add_low_rank": self._add_low_rank,
            "embed": self._embed,
            "best": self._best,
            "likeliest": self._likeliest,
            "Concatenate": self._join,
            "AsType": self._floats,
            "rms_norm": self._rms_norm,
            "rotate": self._rotate,
            **dict.fromkeys(("activate", "gated"), self._activated),
            "experts": self._experts,
            "route": self._route,
            "attend": self._attend,
            "convolve": self._convolve,
            "delta_rule": self._delta_rule,
            "state_space": self._state_space,
            **dict.fromkeys(RESHAPES, self._reshape),
            "Broadcast": self._broadcast,
            "Slice": lambda node: self._view(node, [sliced(self._place(node.inputs[0]), node)]),
            "Split": lambda node: self._view(node, split(self._place(node.inputs[0]), node)),
            "Transpose": self._transpose,
            **{name: partial(self._unary, name) for name in UNARY},
            **{name: partial(self._binary, name) for name in BINARY},
            "Sqrt": lambda node: self._unary("Rsqrt" if node.arguments[0] else "Sqrt", node),
        }

    def add(self, node: Node) -> None:
        """Add a node.

        Raises:
            UnsupportedNode: there is no instruction for it.
        """
        if node.kind not in self._kinds:
            raise UnsupportedNode(node.kind)
        read = [self._program.values[id].dtype for id in node.inputs]
        made = [self._program.values[id].dtype for id in node.outputs]
        taken = _READ_AS.get(node.kind, (mx.float32,))
        makes = _MAKES.get(node.kind, (mx.float32,))
        if any(each not in taken for each in read) or any(each not in makes for each in made):
            raise UnsupportedNode(f"{node.kind} of other types than float32")
        self._kinds[node.kind](node)
        self.computed |= set(node.outputs)

    def add_products(self, nodes: Sequence[Node]) -> None:
        """Add products of the same rows, as one instruction."""
        matrices = []
        for node in nodes:
            bias = node.weight("bias")
            made = self._matrices.of(Matrix(node.weight("weight"), bias))
            if made is None or "bias" in node.roles or "weight" in node.roles:
                raise UnsupportedNode(f"{node.kind} by this weight")
            matrices.append(made)
        x = self._whole(nodes[0].inputs[0])
        outs = [self._new(node.outputs[0]) for node in nodes]
        self._native.products(x, matrices, outs)
        self.computed |= {node.outputs[0] for node in nodes}

    def finish(self, wanted: Sequence[int]) -> Segment:
        """Return the segment.

        Args:
            wanted: ids of computed values that are read outside.
        """
        taken = set[int]()
        for id in wanted:
            shape = fixed(self._program.values[id].shape[1:])
            self._whole(id)
            place = self._place(id)
            if place.value in taken or place.value in self._given.values():
                place = self._copied(place)
            taken.add(place.value)
            self._native.output(place.value, list(shape))
        tokens = self._given.get(self._program.fields.get("tokens", -1))
        if tokens is not None:
            self._native.leave_out_by(tokens)
        self._native.finish()
        return Segment(
            self._native,
            tuple(self._given),
            tuple(wanted),
            layers=tuple(self._layers),
            groups=tuple(self._groups),
            states=tuple(self._states),
            state_groups=tuple(self._state_groups),
            wanted=self._program.values[wanted[0]].shape[0] == WANTED_ROWS,
        )

    # -- views -----------------------------------------------------------------------------------

    def _view(self, node: Node, places: Sequence[Place]) -> None:
        self._places.update(zip(node.outputs, places, strict=True))

    def _reshape(self, node: Node) -> None:
        shape = row_shape(self._program.values[node.outputs[0]])
        row_shape(self._program.values[node.inputs[0]])
        self._whole(node.inputs[0])
        self._view(node, [self._place(node.inputs[0]).reshaped(shape)])

    def _broadcast(self, node: Node) -> None:
        shape = row_shape(self._program.values[node.outputs[0]])
        place = self._place(node.inputs[0])
        if node.inputs[0] in self._program.constants:
            if len(place.shape) > len(shape):  # an axis of rows, of one row
                place = place.reshaped(place.shape[1:])
        elif len(self._program.values[node.inputs[0]].shape) != len(shape) + 1:
            raise UnsupportedNode("a broadcast to more axes")
        self._view(node, [place.broadcast(shape)])

    def _transpose(self, node: Node) -> None:
        self._view(node, [transposed(self._place(node.inputs[0]), node.arguments[0])])

    # -- rows ------------------------------------------------------------------------------------

    def _add_low_rank(self, node: Node) -> None:
        y, x, numbers = (self._whole(id) for id in node.inputs)
        inner, outer = node.weight("inner"), node.weight("outer")
        self._native.add_low_rank(y, x, numbers, self._new(node.outputs[0]), inner, outer)

    def _floats(self, node: Node) -> None:
        self._native.floats(self._whole(node.inputs[0]), self._new(node.outputs[0]))

    def _rms_norm(self, node: Node) -> None:
        weight = self._weight(node, "weight")
        if weight is None and "weight" in node.roles:
            raise UnsupportedNode("norms by computed weights")
        number = None if weight is None else self._constant(weight)
        shape = row_shape(self._program.values[node.outputs[0]])
        x = self._whole(node.inputs[0])
        out = self._new(node.outputs[0])
        heads = prod(shape[:-1])
        self._native.rms_norm(x, number, out, node.attributes["eps"], heads, shape[-1])

    def _rotate(self, node: Node) -> None:
        x, cosines, sines = (node.input(role) for role in ("x", "cosines", "sines"))
        if x is None or cosines is None or sines is None:
            raise UnsupportedNode("rotations by constant angles")
        heads, dim = row_shape(self._program.values[x])
        (half,) = row_shape(self._program.values[cosines])
        numbers = [self._whole(each) for each in (x, cosines, sines)]
        neighbours = node.attributes["neighbours"]
        self._native.rotate(*numbers, self._new(node.outputs[0]), heads, dim, half, neighbours)

    def _activated(self, node: Node) -> None:
        """Add an activation, or a gate that activates one of two values."""
        gating = node.attributes.get("gating")
        activation = node.attributes["name"] if gating is None else gating.activation
        name = _GATES.get(activation) if gating is None or gating.plain else None
        if name is None:
            raise UnsupportedNode(f"activates by {activation}")
        values = [self._whole(id) for id in node.inputs]
        out, width = node.outputs[0], prod(row_shape(self._program.values[node.outputs[0]]))
        if gating is None:
            self._native.activate(*values, self._new(out), name)
        else:
            self._native.gate(*values, self._new(out), name, width)

    def _experts(self, node: Node) -> None:
        experts = node.weight("experts")
        known = isinstance(experts, GatedExperts) and experts.gating.plain
        name = _GATES.get(experts.gating.activation) if known else None
        if name is None:
            raise UnsupportedNode("experts with this gate")
        gate, up, down = (
            self._matrices.of(Matrix(each.weight, each.bias)) for each in experts.matrices
        )
        x, chosen, weights = (node.input(role) for role in ("x", "chosen", "weights"))
        if None in (gate, up, down) or x is None or chosen is None or weights is None:
            raise UnsupportedNode("experts by these weights")
        (k,) = row_shape(self._program.values[chosen])
        inner = k * experts.up.array.shape[1]
        ids = self._whole(chosen)
        gates, values = self._native.value(inner), self._native.value(inner)
        for matrices, out in ((gate, gates), (up, values)):
            self._native.experts(self._whole(x), ids, matrices, out, k, True)
        joined = self._native.value(inner)
        self._native.gate(gates, values, joined, name, inner)
        (width,) = row_shape(self._program.values[node.outputs[0]])
        outputs = self._native.value(k * width)
        self._native.experts(joined, ids, down, outputs, k, False)
        self._native.mix(outputs, self._whole(weights), self._new(node.outputs[0]), k)

    def _route(self, node: Node) -> None:
        logits, routing = node.input("logits"), node.attributes["router"].routing
        if routing is None or logits is None:
            raise UnsupportedNode("routers that choose experts one after the other")
        names = "correction", "per_expert"
        given = [self._weight(node, name) for name in names]
        if any(
            each is None and name in node.roles for name, each in zip(names, given, strict=True)
        ):
            raise UnsupportedNode("routers by computed weights")
        added, factors = (None if each is None else self._constant(each) for each in given)
        whole = self._whole(logits)
        made = [self._new(id) for id in node.outputs]
        self._native.route(whole, added, factors, *made, **asdict(routing))

    def _unary(self, name: str, node: Node) -> None:
        row_shape(self._program.values[node.inputs[0]])
        self._native.unary(name, self._whole(node.inputs[0]), self._new(node.outputs[0]))

    def _binary(self, name: str, node: Node) -> None:
        whole = row_shape(self._program.values[node.outputs[0]])
        places = [self._operand(id, whole) for id in node.inputs]
        out = self._new(node.outputs[0])
        shape, strides = joined_axes([*places, self._places[node.outputs[0]]])
        (a, b), (x, y, _) = places, strides
        self._native.binary(name, a.value, x, b.value, y, out, shape)

    def _operand(self, id: int, shape: tuple[int, ...]) -> Place:
        """Return an operand of elements, as a place of the result's shape without an offset."""
        place = self._place(id)
        if id in self._program.constants and len(place.shape) > len(shape):
            place = place.reshaped(place.shape[1:])
        if place.offset:
            place = self._copied(place)
        return place.broadcast(shape)

    # -- attention -------------------------------------------------------------------------------

    def _attend(self, node: Node) -> None:
        own, layer = node.attributes, node.attributes["layer"]
        if layer in self._layout.uncached:
            raise UnsupportedNode("attention in both directions")
        group, owner = self._layout.group[layer], self._layout.owner[layer]
        spec = self._layout.groups[group].spec.attention
        if own.get("chosen_by") is not None or spec is None or spec.value_in_key:
            raise UnsupportedNode("attention of this kind")
        if "sinks" in node.roles or spec.head_dim % MULTIPLE or spec.value_dim % MULTIPLE:
            raise UnsupportedNode("attention over heads of this size")
        q, k, v = (node.input(role) for role in ("q", "k", "v"))
        assert q is not None, "attention has queries"
        sinks = node.weight("sinks")
        if sinks is not None:
            sinks = self._constant(sinks)
        heads = row_shape(self._program.values[q])[0]
        number, *written = (None if id is None else self._whole(id) for id in (q, k, v))
        if owner not in self._layers:
            self._layers.append(owner)
        if group not in self._groups:
            self._groups.append(group)
        rows = self._groups.index(group)
        pools = [2 * self._layers.index(owner) + part for part in range(2)]
        for vectors, pool in zip(written, pools, strict=True):
            if vectors is not None:
                self._native.write(vectors, pool, rows, spec.kv_heads)
        self._native.attend(
            number,
            sinks,
            self._new(node.outputs[0]),
            *pools,
            rows,
            heads,
            spec.kv_heads,
            own["scale"],
            own.get("softcap") or 0.0,
        )
