"""Computes single nodes of a program with MLX. It defines what nodes mean, and is the reference for
executors.

Building a whole step this way takes one to eight times as long as by the model's own code. So it
serves only nodes between two CUDA graphs or segments that kernels do not compute.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from quire.device.operations import Operations
from quire.device.recurrence import DeltaGates
from quire.models.base import ForwardContext
from quire.program.primitives import compute
from quire.program.values import FUSED, KEEPS_ORDER, Node, Program, Weight, bound


def run_node(
    program: Program,
    node: Node,
    known: dict[int, mx.array],
    operations: Operations,
    sizes: Mapping[str, int],
    step: ForwardContext | None = None,
) -> None:
    """Compute one node, and add its outputs to `known`, arrays by the ids of values.

    Args:
        sizes: values of the program's symbols.
        step: the forward context of nodes that read or write pools.
    """
    if node.kind == FUSED:
        for each in node.arguments:
            run_node(program, each, known=known, operations=operations, sizes=sizes, step=step)
        return
    inputs = [known[id] for id in node.inputs]
    if node.is_operation:
        found = _operation(node, inputs, operations=operations, step=step)
    else:
        values = [program.values[id] for id in node.outputs]
        shape, arguments = bound(values[0].shape, sizes), bound(node.arguments, sizes)
        found = compute(
            node.kind, inputs, arguments=arguments, shape=shape, dtypes=[v.dtype for v in values]
        )
    known.update(zip(node.outputs, found, strict=True))


def _operation(
    node: Node, inputs: list[mx.array], operations: Operations, step: ForwardContext | None
) -> list[mx.array]:
    given = {k: v.value if isinstance(v, Weight) else v for k, v in node.attributes.items()}
    given |= dict(zip(node.roles, inputs, strict=True))
    if node.kind == "rotate":
        rotation = operations.rotation(given["cosines"], given["sines"], given["neighbours"])
        return [rotation(given["x"])]
    if node.kind not in KEEPS_ORDER:
        found = getattr(operations, node.kind)(**given)
        return list(found) if isinstance(found, tuple) else [found]
    assert step is not None, "a node that uses pools belongs to a step"
    if node.kind == "delta_rule":
        names = DeltaGates.__dataclass_fields__
        gates = DeltaGates(**{name: given.pop(name) for name in names})
        return [step.delta_rule(gates=gates, **given)]
    found = getattr(step, node.kind)(**given)
    return [] if found is None else [found]
