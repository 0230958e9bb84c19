"""A program: the nodes that compute a step, and the values that pass between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

FUSED = "fused"
"""Kind of a node that one kernel computes; its `arguments` are the nodes it consists of."""
KEEPS_ORDER = frozenset({"attend", "choose", "convolve", "delta_rule", "state_space"})
"""Kinds of calls of the forward context, which read and write pools."""


@dataclass(frozen=True)
class Form:
    """An integer that is linear in a step's sizes: `constant + sum(factor * symbol)`."""

    constant: int
    terms: tuple[tuple[str, int], ...]

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return the integer for given sizes, which are named by symbol."""
        return self.constant + sum(factor * sizes[name] for name, factor in self.terms)

    def __str__(self) -> str:
        parts = [name if factor == 1 else f"{factor}*{name}" for name, factor in self.terms]
        return "+".join(parts + [str(self.constant)] * (self.constant != 0))


Size = int | Form
ROWS = Form(0, (("T", 1),))
"""The number of a step's rows, T."""


def bound(value: Any, sizes: Mapping[str, int]) -> Any:
    """Return nested tuples with all forms replaced by their values."""
    if isinstance(value, tuple):
        return tuple(bound(each, sizes) for each in value)
    return value.at(sizes) if isinstance(value, Form) else value


def depends_on_sizes(value: Any) -> bool:
    """Whether nested tuples contain a form."""
    return isinstance(value, Form) or (
        isinstance(value, tuple) and any(map(depends_on_sizes, value))
    )


@dataclass(frozen=True)
class Value:
    """A result of a node: its shape and type."""

    shape: tuple[Size, ...]
    dtype: mx.Dtype

    def __str__(self) -> str:
        short = str(self.dtype).removeprefix("mlx.core.").replace("float", "f").replace("int", "i")
        return f"{short}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight among a node's attributes.

    Attributes:
        name: the path of its array, or of the first of its arrays.
        value: the weight in the form that `Operations` takes: an array, or a dataclass of
            `device.weights`.
    """

    name: str
    value: Any

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Constant:
    """An array that does not depend on the step.

    Attributes:
        name: the path of a weight, a description of what was computed from weights, or "".
    """

    name: str
    array: mx.array


@dataclass(frozen=True, eq=False)
class Node:
    """One computation: an operation, a primitive of MLX, or several nodes that one kernel computes.

    Attributes:
        kind: an operation's name in lower case, the name of an MLX primitive, or `FUSED`.
        inputs, outputs: ids of values.
        roles: for an operation, the parameter that each input is passed as.
        arguments: for a primitive, see `primitives`; for a fused node, its nodes.
        attributes: for an operation, its other arguments by name, including weights.
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    roles: tuple[str, ...] = ()
    arguments: tuple[Any, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_operation(self) -> bool:
        """Whether it is a call of `Operations` or of the forward context."""
        return self.kind[0].islower() and self.kind != FUSED

    @property
    def parts(self) -> tuple[Node, ...]:
        """The nodes that it consists of: one, unless it is fused."""
        return self.arguments if self.kind == FUSED else (self,)

    @property
    def fused(self) -> Node:
        """The node itself if it is fused; else a fused node that consists of it."""
        if self.kind == FUSED:
            return self
        return Node(FUSED, self.inputs, self.outputs, arguments=(self,))

    @property
    def name(self) -> str:
        """The kind; of a fused node, what its kernel computes."""
        return str(self.attributes["what"]) if self.kind == FUSED else self.kind

    @property
    def reads(self) -> list[int]:
        """Ids of the values that its parts read and do not compute, constants included."""
        inside = {id for each in self.parts for id in each.outputs}
        found = dict.fromkeys(id for each in self.parts for id in each.inputs)
        return [id for id in found if id not in inside]

    @property
    def uses_pools(self) -> bool:
        """Whether it reads or writes pools."""
        return any(each.kind in KEEPS_ORDER for each in self.parts)

    def input(self, role: str) -> int | None:
        """Return the value passed as a parameter; None if a weight or nothing is passed."""
        return self.inputs[self.roles.index(role)] if role in self.roles else None

    def weight(self, name: str) -> Any:
        """Return the weight passed as a parameter, in the form that `Operations` takes; None
        without one.
        """
        found = self.attributes.get(name)
        return found.value if isinstance(found, Weight) else None


@dataclass(frozen=True, eq=False)
class Program:
    """A step, or a part of it.

    Attributes:
        symbols: the sizes that shapes depend on: T rows, R wanted rows and others.
        fields: ids of the step's inputs, by name.
        constants, values: by id.
        nodes: nodes in a valid order of computation.
        outputs: ids of the outputs.
    """

    symbols: tuple[str, ...]
    fields: Mapping[str, int]
    constants: Mapping[int, Constant]
    values: Mapping[int, Value]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    def inside(self, node: Node) -> Program:
        """Return the program of a fused node's own nodes."""
        return replace(self, nodes=node.parts, outputs=())

    def __str__(self) -> str:
        """Print one node a line, the nodes of a fused one indented below it."""
        lines = [f"program of {', '.join(self.symbols) or 'one item'}"]
        lines += [f"  {self._typed(id)} = {name}" for name, id in self.fields.items()]
        lines += ["  " + line for node in self.nodes for line in self.lines(node)]
        return "\n".join([*lines, f"  return {', '.join(map(self._name, self.outputs))}"])

    def lines(self, node: Node, indent: str = "") -> Iterator[str]:
        """Yield the lines of a printed node: its own, and those of the nodes fused in it."""
        given = list(map(self._name, node.inputs))
        if node.roles:
            given = [f"{role}={name}" for role, name in zip(node.roles, given, strict=True)]
        if node.kind != FUSED:
            given += map(_shown, node.arguments)
        given += [f"{key}={_shown(x)}" for key, x in node.attributes.items() if x is not None]
        outputs = ", ".join(map(self._typed, node.outputs))
        yield f"{indent}{outputs}{' = ' * bool(outputs)}{node.kind}({', '.join(given)})"
        for each in node.arguments if node.kind == FUSED else ():
            yield from self.lines(each, indent + "    ")

    def _name(self, id: int) -> str:
        constant = self.constants.get(id)
        if constant is None:
            return f"%{id}"
        if constant.name:
            return constant.name
        return f"{constant.array.item():.6g}" if constant.array.size == 1 else f"@{id}"

    def _typed(self, id: int) -> str:
        return f"%{id}:{self.values[id]}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "(" + ",".join(map(_shown, value)) + ")"
    return f"{value:.6g}" if isinstance(value, float) else str(value).removeprefix("mlx.core.")
