"""Passes that remove nodes from programs: constant folding, views and casts that change nothing."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from quire.program.primitives import ELEMENTWISE, VIEWS, compute
from quire.program.values import Constant, Node, Program, bound, depends_on_sizes


def fold_constants(program: Program) -> Program:
    """Compute once everything that depends on weights alone. Constants that are broadcast for
    elements alone stay small: kernels read them so.
    """
    constants, nodes = dict(program.constants), list[Node]()
    broadcasts = dict[int, Node]()
    for node in program.nodes:
        shapes = tuple(program.values[id].shape for id in node.outputs)
        if (
            node.is_operation
            or not constants.keys() >= set(node.inputs)
            or depends_on_sizes((node.arguments, *shapes))
        ):
            nodes.append(node)
            continue
        inputs = [constants[id].array for id in node.inputs]
        dtypes = [program.values[id].dtype for id in node.outputs]
        shape = bound(shapes[0], {})
        made = compute(node.kind, inputs, arguments=node.arguments, shape=shape, dtypes=dtypes)
        names = ", ".join(name for id in node.inputs if (name := constants[id].name))
        label = f"{node.kind}({names})" if names else ""
        constants |= {id: Constant(label, y) for id, y in zip(node.outputs, made, strict=True)}
        if node.kind == "Broadcast":
            broadcasts[node.outputs[0]] = node
    others = {id for node in nodes if node.kind not in ELEMENTWISE for id in node.inputs}
    for id in others.union(program.outputs):
        broadcasts.pop(id, None)
    constants = {id: each for id, each in constants.items() if id not in broadcasts}
    nodes = [*broadcasts.values(), *nodes]
    return pruned(replace(program, constants=constants, nodes=tuple(nodes)))


def drop_idle_views(program: Program) -> Program:
    """Remove views and casts that change nothing, and nodes whose outputs nobody reads."""
    alias: dict[int, int] = {}
    kept: list[Node] = []
    transposed: dict[int, Node] = {}
    for node in program.nodes:
        node = replace(node, inputs=tuple(alias.get(id, id) for id in node.inputs))
        before = transposed.get(node.inputs[0]) if node.kind == "Transpose" else None
        if _changes_nothing(program, node):
            alias[node.outputs[0]] = node.inputs[0]
        elif before is not None and _undoes(node, before):
            alias[node.outputs[0]] = before.inputs[0]
        else:
            kept.append(node)
            if node.kind == "Transpose":
                transposed[node.outputs[0]] = node
    outputs = tuple(alias.get(id, id) for id in program.outputs)
    return pruned(replace(program, nodes=tuple(kept), outputs=outputs))


def _undoes(node: Node, before: Node) -> bool:
    """Return whether a transpose puts the axes back that another one moved."""
    axes = before.arguments[0]
    return [axes[axis] for axis in node.arguments[0]] == sorted(axes)


def _changes_nothing(program: Program, node: Node) -> bool:
    if node.kind not in {*VIEWS, "AsType"} or len(node.outputs) != 1:
        return False
    if program.values[node.inputs[0]] != program.values[node.outputs[0]]:
        return False
    if node.kind == "Transpose":
        return bool(node.arguments[0] == tuple(sorted(node.arguments[0])))
    return node.kind != "Slice" or all(step == 1 for step in node.arguments[2])


def pruned(program: Program) -> Program:
    """Remove nodes whose outputs nobody reads, unless they write to pools."""
    read = set(program.outputs)
    nodes: list[Node] = []
    for node in reversed(program.nodes):
        if read & set(node.outputs) or node.uses_pools:
            read |= {*node.inputs, *node.reads}
            nodes.append(node)
    constants = {id: each for id, each in program.constants.items() if id in read}
    return replace(program, nodes=tuple(reversed(nodes)), constants=constants)


def simplified(program: Program) -> Program:
    """Run the passes that remove nodes. None of the rest is fused."""
    for each in (drop_idle_views, fold_constants, drop_idle_views):
        program = each(program)
    return program


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
