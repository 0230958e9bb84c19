"""The pass that multiplies rows by several matrices at once, which lie side by side in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import mlx.core as mx

from quire.device.weights import JoinedMatrix
from quire.program.values import ROWS, Node, Program, Value, Weight

Joined = Mapping[tuple[str, ...], JoinedMatrix]
"""Matrices side by side, by the paths of their weights in order."""


def with_matrices_joined(program: Program, joined: Joined) -> Program:
    """Return the program with one product for each group of matrices, whose result is split."""
    values, first = dict(program.values), dict[Node, list[Node]]()
    gone = set[Node]()
    for nodes in _alike(program):
        if tuple(map(_path, nodes)) in joined:
            first[nodes[0]] = nodes
            gone.update(nodes)
    made = list[Node]()
    for node in program.nodes:
        if node not in gone:
            made.append(node)
        elif node in first:
            made += _joined(first[node], joined, values)
    return replace(program, nodes=tuple(made), values=values)


def _joined(nodes: Sequence[Node], joined: Joined, values: dict[int, Value]) -> list[Node]:
    """Return the nodes in place of the products of a group.

    Args:
        values: gets the value of all results.
    """
    paths, whole = tuple(map(_path, nodes)), max(values) + 1
    outputs = [each.outputs[0] for each in nodes]
    widths = [values[each].shape[-1] for each in outputs]
    cuts = tuple(accumulate(width for width in widths if isinstance(width, int)))
    values[whole] = replace(values[outputs[0]], shape=(*values[outputs[0]].shape[:-1], cuts[-1]))
    found = {"weight": joined[paths].weight, "bias": joined[paths].bias}
    named = {
        role: None if each is None else Weight("+".join(_path(node, role) for node in nodes), each)
        for role, each in found.items()
    }
    product = replace(nodes[0], outputs=(whole,), attributes=named)
    axis = len(values[whole].shape) - 1
    return [product, Node("Split", (whole,), tuple(outputs), arguments=(cuts[:-1], axis))]


def _alike(program: Program) -> list[list[Node]]:
    """Return the products of all rows with plain matrices, by the value that they multiply."""
    found: dict[int, list[Node]] = {}
    for node in program.nodes:
        if node.kind != "linear" or len(node.inputs) > 1:
            continue
        weight = node.weight("weight")
        rows = program.values[node.outputs[0]].shape[0] == ROWS
        if rows and isinstance(weight, mx.array) and weight.ndim == 2:
            found.setdefault(node.inputs[0], []).append(node)
    return [nodes for nodes in found.values() if len(nodes) > 1]


def _path(product: Node, role: str = "weight") -> str:
    return str(product.attributes[role])
