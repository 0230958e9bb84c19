"""A pass over the tables that a program looks up rows of."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from quire.program.folding import drop_idle_views
from quire.program.values import Node, Program


def convert_tables(program: Program) -> Program:
    """Look up rows of tables of floats in the type that all their readers convert them to."""
    readers: dict[int, list[Node]] = {}
    for node in program.nodes:
        for id in node.inputs:
            readers.setdefault(id, []).append(node)
    values, nodes = dict(program.values), list[Node]()
    for node in program.nodes:
        if node.kind == "embed" and isinstance(node.weight("table"), mx.array):
            (out,) = node.outputs
            types = {_converts_to(each) for each in readers.get(out, ())}
            if out not in program.outputs and len(types) == 1 and (dtype := types.pop()):
                values[out] = replace(values[out], dtype=dtype)
                node = replace(node, attributes={**node.attributes, "dtype": dtype})
        nodes.append(node)
    return drop_idle_views(replace(program, values=values, nodes=tuple(nodes)))


def _converts_to(node: Node) -> mx.Dtype | None:
    return node.arguments[0] if node.kind == "AsType" else None
