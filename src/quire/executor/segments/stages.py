"""Divides the program of a step into segments, and nodes that MLX computes between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from quire.cache.specs import KVLayout
from quire.device.device import current_device
from quire.executor.segments.builder import Segment, SegmentBuilder
from quire.executor.segments.places import UnsupportedNode
from quire.models.base import ForwardContext
from quire.program.passes import PRODUCTS
from quire.program.primitives import VIEWS
from quire.program.replay import run_node
from quire.program.values import Node, Program
from quire.program.wanted_rows import FIELD, WANTED, WANTED_ROWS


@dataclass(frozen=True)
class Stages:
    """A program as segments and nodes that MLX computes, in order of computation.

    Attributes:
        inside: number of nodes that segments compute, views included.
    """

    program: Program
    order: tuple[Segment | Node, ...]
    inside: int

    @cached_property
    def in_place(self) -> bool:
        """Whether segments alone touch the pools, which they write to where these lie."""
        return not any(isinstance(each, Node) and each.uses_pools for each in self.order)

    def run(
        self,
        fields: Mapping[str, mx.array],
        rows: int,
        compute: Callable[[Segment, list[mx.array]], Sequence[mx.array]],
        step: ForwardContext | None = None,
    ) -> list[mx.array]:
        """Return the program's outputs.

        Args:
            fields: arrays of the program's fields, by name.
            rows: number of rows, T.
            compute: returns a segment's outputs for the arrays that it is given.
            step: see `run_node`.
        """
        program, operations = self.program, current_device().operations
        sizes = {"T": rows, WANTED: len(fields.get(FIELD, ()))}
        known = self._constants | {id: fields[name] for name, id in program.fields.items()}
        for stage in self.order:
            if isinstance(stage, Segment):
                found = compute(stage, [known[id] for id in stage.given])
                known.update(zip(stage.outputs, found, strict=True))
            else:
                run_node(program, stage, known, operations=operations, sizes=sizes, step=step)
        return [known[id] for id in program.outputs]

    @cached_property
    def _constants(self) -> dict[int, mx.array]:
        """The constants that nodes outside segments read, or the program returns."""
        nodes = [each for each in self.order if isinstance(each, Node)]
        read = {id for node in nodes for id in node.reads} | set(self.program.outputs)
        constants = self.program.constants
        return {id: each.array for id, each in constants.items() if id in read}


def staged(
    program: Program, layout: KVLayout, ops: Any, refused: Collection[str] = frozenset()
) -> Stages:
    """Divide a program into as few segments as its order allows.

    Args:
        ops: the extension of CPU kernels.
        refused: kinds of nodes that are left to MLX.
    """
    outside = _outside(program, layout, ops, refused=refused)
    order: list[Segment | Node] = []
    known = {*program.constants, *program.fields.values()}
    inside = 0
    pending, later = _by_rows(program)
    while pending:
        # What segments cannot compute comes first: the next segment is longer then.
        alone = _ready(pending, known, lambda node: node in outside)
        order += alone
        pending = _without(pending, alone)
        batch = _ready(pending, known, lambda node: node not in outside)
        pending = _without(pending, batch)
        if all(node.kind in VIEWS for node in batch):
            order += batch
        else:
            builder = SegmentBuilder(program, layout, ops)
            for nodes in _instructions(batch):
                _add(builder, nodes)
            read = {value for node in (*pending, *later) for value in node.inputs}
            read.update(program.outputs)
            order.append(builder.finish(sorted(builder.computed & read)))
            inside += len(batch)
        if not pending:
            pending, later = later, []
    return Stages(program, tuple(order), inside)


def _by_rows(program: Program) -> tuple[list[Node], list[Node]]:
    """Return the nodes whose values have all rows, and those whose values have the wanted ones."""
    every, wanted = list[Node](), list[Node]()
    for node in program.nodes:
        shapes = [program.values[id].shape for id in node.outputs]
        (wanted if any(shape[:1] == (WANTED_ROWS,) for shape in shapes) else every).append(node)
    return every, wanted


def _outside(program: Program, layout: KVLayout, ops: Any, refused: Collection[str]) -> set[Node]:
    """Return the nodes that no instruction computes."""
    trial = SegmentBuilder(program, layout, ops)
    found = set[Node]()
    for node in program.nodes:
        try:
            if node.kind in refused:
                raise UnsupportedNode(node.kind)
            trial.add(node)
        except UnsupportedNode:
            found.add(node)
    return found


def _ready(pending: Sequence[Node], known: set[int], wanted: Callable[[Node], bool]) -> list[Node]:
    """Return the wanted nodes that can be computed now, in order; their outputs become known.

    Nodes that touch pools stay in the program's order.
    """
    found: list[Node] = []
    in_turn = True
    for node in pending:
        ordered = node.uses_pools
        if wanted(node) and known >= set(node.inputs) and (in_turn or not ordered):
            found.append(node)
            known |= set(node.outputs)
        elif ordered:
            in_turn = False
    return found


def _without(pending: Sequence[Node], taken: Sequence[Node]) -> list[Node]:
    gone = set(taken)
    return [node for node in pending if node not in gone]


def _instructions(batch: Sequence[Node]) -> list[list[Node]]:
    """Group products of the same rows; each other node is a group of its own."""
    groups: list[list[Node]] = []
    products: dict[int, list[Node]] = {}
    for node in batch:
        if node.kind in PRODUCTS and node.inputs[0] in products:
            products[node.inputs[0]].append(node)
            continue
        groups.append([node])
        if node.kind in PRODUCTS:
            products[node.inputs[0]] = groups[-1]
    return groups


def _add(builder: SegmentBuilder, nodes: Sequence[Node]) -> None:
    if nodes[0].kind in PRODUCTS:
        builder.add_products(nodes)
    else:
        builder.add(nodes[0])
