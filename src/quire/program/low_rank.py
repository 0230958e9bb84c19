"""Adds the low-rank products of adapters to a program, as operands by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import mlx.core as mx

from quire.program.passes import PRODUCTS
from quire.program.values import Node, Program, Value, Weight

LowRankFactors = Mapping[str, tuple[mx.array, mx.array]]
"""First and second factors, `[n, rank, in]` and `[n, rank, out]`, by the name of their weight."""
NUMBERS = "adapters"
"""Name of the field with each row's number among the factors, int32 `[T]`."""


def shapes_of(factors: LowRankFactors) -> tuple[tuple[object, ...], ...]:
    """Return what kernels know of factors: names of matrices, ranks, and numbers of columns."""
    return tuple((name, *factors[name][0].shape[1:]) for name in sorted(factors))


def arrays_of(factors: LowRankFactors) -> list[mx.array]:
    """Return the factors in the order of their weights' names."""
    return [array for name in sorted(factors) for array in factors[name]]


def with_low_rank(program: Program, factors: LowRankFactors) -> Program | None:
    """Return the program with an `add_low_rank` node after each product that adapters change.

    Args:
        factors: see `Operations.add_low_rank`.

    Returns:
        None if a weight with factors is used otherwise than by a product of the step's rows.
    """
    (rows,) = program.values[program.fields["tokens"]].shape
    values, nodes = dict(program.values), list[Node]()
    numbers = max(values) + 1
    values[numbers] = Value((rows,), mx.int32)
    changed = set[str]()
    for node in program.nodes:
        weight = node.attributes.get("weight")
        found = factors.get(weight.name) if isinstance(weight, Weight) else None
        if weight is None or found is None:
            nodes.append(node)
            continue
        (x,), (y,) = node.inputs, node.outputs
        kept = node.kind in PRODUCTS and values[x].shape[:-1] == (rows,)
        if not kept or any(each.dtype != values[y].dtype for each in found):
            return None
        plain = max(values) + 1
        values[plain] = values[y]
        path = weight.name.removesuffix(".weight")
        inner, outer = (
            Weight(f"{path}.lora_{letter}", each) for letter, each in zip("ab", found, strict=True)
        )
        added = Node(
            "add_low_rank",
            (plain, x, numbers),
            outputs=(y,),
            roles=("y", "x", "numbers"),
            attributes={"inner": inner, "outer": outer},
        )
        nodes += [replace(node, outputs=(plain,)), added]
        changed.add(weight.name)
    if changed != factors.keys():
        return None
    fields = {**program.fields, NUMBERS: numbers}
    return replace(program, values=values, nodes=tuple(nodes), fields=fields)
