"""The pass that lets the end of a program compute only the rows whose results are wanted.

Of a prompt's rows few are: none before its end. Behind the last layer that keeps keys or states, no
other row needs the rest. Layers behind it may still read keys that earlier ones kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from quire.program.passes import RESHAPES
from quire.program.primitives import ELEMENTWISE
from quire.program.values import (
    ROWS,
    Form,
    Node,
    Program,
    Value,
    depends_on_sizes,
)

FIELD = "wanted"
"""Name of the field with the wanted rows' numbers: int32 `[R]`."""
WANTED = "R"
"""Symbol of the number of wanted rows."""
WANTED_ROWS = Form(0, ((WANTED, 1),))
"""The first axis of values of wanted rows."""
_BY_ROW = frozenset(
    {
        *(ELEMENTWISE.keys() - {"Arange"}),
        *RESHAPES,
        *("Broadcast", "Slice", "Split", "Transpose", "Concatenate", "Reduce", "Softmax"),
        *("linear", "packed_linear", "rms_norm", "layer_norm", "activate", "gated"),
        *("rotate", "attend"),
        *("route", "experts", "expert_outputs", "weighted_sum", "by_head"),
    }
)
"""Kinds of nodes that compute each row from that row alone, if all their values keep rows first."""


def with_wanted_rows(program: Program, *, attends: bool = False) -> Program:
    """Return the program with an end that computes the wanted rows: what no node that uses pools
    needs. Its output has `R` rows, and the rows of its field `FIELD`.

    Programs whose end is not computed row by row are returned unchanged.

    Args:
        attends: whether layers that keep nothing belong to the end, too. Their attention is then
            of the wanted rows.
    """
    end = _end(program, attends=attends)
    made = {value for node in end for value in node.outputs}
    read = dict.fromkeys(value for node in end for value in node.inputs)
    given = [id for id in read if id not in made and depends_on_sizes(program.values[id].shape)]
    by_row = all(each.kind in _BY_ROW for each in end)
    if not (by_row and made.issuperset(program.outputs) and _have_rows(program, [*given, *made])):
        return program
    values, wanted = dict(program.values), max(program.values) + 1
    values[wanted] = Value((WANTED_ROWS,), mx.int32)
    chosen: dict[int, int] = {}
    nodes = [each for each in program.nodes if each not in set(end)]
    for id in given:
        chosen[id] = own = len(chosen) + wanted + 1
        shape = values[id].shape
        values[own] = _of_wanted(values[id])
        nodes.append(Node("Gather", (id, wanted), (own,), arguments=((0,), (1, *shape[1:]))))
    for node in end:
        inputs = tuple(chosen.get(id, id) for id in node.inputs)
        nodes.append(replace(node, inputs=inputs, arguments=_renamed(node.arguments)))
        values |= {id: _of_wanted(values[id]) for id in node.outputs}
    return replace(
        program,
        symbols=(*program.symbols, WANTED),
        fields={**program.fields, FIELD: wanted},
        values=values,
        nodes=tuple(nodes),
    )


def _end(program: Program, *, attends: bool) -> list[Node]:
    """Return the nodes that no node with pools needs, in order; see `with_wanted_rows`."""
    needed, end = set[int](), list[Node]()
    for node in reversed(program.nodes):
        keeps = not _only_reads(node) if attends else node.uses_pools
        if keeps or needed.intersection(node.outputs):
            needed.update(node.inputs)
        else:
            end.append(node)
    return end[::-1]


def _only_reads(node: Node) -> bool:
    """Return whether a node writes nothing to pools, and reads no choice that others made."""
    if node.kind == "attend":
        return "k" not in node.roles and node.attributes.get("chosen_by") is None
    return not node.uses_pools


def _have_rows(program: Program, values: Iterable[int]) -> bool:
    """Return whether the first axis of each value is that of all rows, and no other axis varies."""
    shapes = (program.values[id].shape for id in values)
    return all(
        shape and shape[0] == ROWS and not depends_on_sizes(tuple(shape[1:])) for shape in shapes
    )


def _of_wanted(value: Value) -> Value:
    return replace(value, shape=_renamed(value.shape))


def _renamed(part: Any) -> Any:
    """Return nested tuples in which wanted rows take the place of all rows."""
    if isinstance(part, tuple):
        return tuple(map(_renamed, part))
    if not isinstance(part, Form):
        return part
    terms = ((WANTED if name == "T" else name, n) for name, n in part.terms)
    return replace(part, terms=tuple(terms))
