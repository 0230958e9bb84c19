"""Small passes that transform programs: fusion into nodes of one kernel.

A pass does not change what a program computes; tests/program/test_passes.py checks it by `replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from quire.program.folding import pruned, simplified
from quire.program.pieces import at_once
from quire.program.primitives import ELEMENTWISE
from quire.program.values import FUSED, Form, Node, Program, Size, Value

PRODUCTS = frozenset({"linear", "packed_linear"})
RESHAPES = frozenset({"Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze", "StopGradient"})
_READ_THROUGH = RESHAPES | {"Broadcast", "Slice", "Split"}


class Uses:
    """The producer and the readers of each value, looking through reshapes."""

    def __init__(self, program: Program) -> None:
        self.makers = {id: node for node in program.nodes for id in node.outputs}
        self._readers: dict[int, list[Node]] = {}
        for node in program.nodes:
            for id in node.inputs:
                self._readers.setdefault(id, []).append(node)
        self._outputs = set(map(self.source, program.outputs))

    def source(self, id: int) -> int:
        """Return the value that this value is a reshape of, through several reshapes if need be."""
        while (maker := self.makers.get(id)) is not None and maker.kind in RESHAPES:
            id = maker.inputs[0]
        return id

    def maker(self, id: int | None) -> Node | None:
        """Return the node that computes a value, before any reshapes."""
        return None if id is None else self.makers.get(self.source(id))

    def readers(self, id: int) -> list[Node]:
        """Return the nodes that read a value or a reshape of it."""
        found: list[Node] = []
        for node in self._readers.get(id, ()):
            if node.kind in RESHAPES:
                found += self.readers(node.outputs[0])
            else:
                found.append(node)
        return found

    def is_output(self, id: int) -> bool:
        """Whether a value or a reshape of it is an output of the program."""
        return self.source(id) in self._outputs

    def only_reader(self, id: int) -> Node | None:
        """Return the one node that reads a value; None if there are more or none."""
        readers = self.readers(id)
        return readers[0] if len(readers) == 1 and not self.is_output(id) else None


def fuse(program: Program, groups: Sequence[tuple[str, Sequence[Node]]]) -> Program:
    """Replace each group of nodes by one fused node, at the position of the group's last node.

    Views through which a group's nodes read are copied into it, and stay outside if others read
    them.

    Args:
        groups: pairs of a group's name and its nodes. Groups are disjoint. No node outside a group
            may both depend on it and be needed by it.
    """
    uses = Uses(program)
    place = {node: number for number, node in enumerate(program.nodes)}
    gone, fused = set[Node](), dict[Node, Node]()
    for what, nodes in groups:
        ordered = sorted(nodes, key=place.__getitem__)
        gone.update(nodes)
        fused[ordered[-1]] = _fused(program, uses, place, what=what, nodes=ordered)
    left = [node for node in program.nodes if node not in gone or node in fused]
    order = tuple(fused.get(node, node) for node in left)
    return pruned(_in_order(replace(program, nodes=order)))


def _fused(
    program: Program, uses: Uses, place: Mapping[Node, int], *, what: str, nodes: Sequence[Node]
) -> Node:
    """Return the node of a group.

    Args:
        place: the number of each node of the program.
        nodes: in order.
    """
    made = {id for node in nodes for id in node.outputs}
    views = set[Node]()
    pending = [id for node in nodes for id in node.inputs]
    while pending:  # the views through which the group reads
        maker = uses.makers.get(pending.pop())
        if maker is not None and maker.kind in _READ_THROUGH and maker not in views:
            views.add(maker)
            pending += maker.inputs
    body = sorted({*nodes, *views}, key=place.__getitem__)
    own = made.union(*(view.outputs for view in views))
    read = dict.fromkeys(id for node in body for id in node.inputs if id not in own)
    given = tuple(
        value
        for node in nodes
        for value in node.outputs
        if uses.is_output(value) or not set(nodes).issuperset(uses.readers(value))
    )
    inputs = tuple(id for id in read if id not in program.constants)
    return Node(FUSED, inputs, given, arguments=tuple(body), attributes={"what": what})


def _in_order(program: Program) -> Program:
    """Sort nodes topologically and stably."""
    ready = {*program.constants, *program.fields.values()}
    waiting, nodes = list(program.nodes), list[Node]()
    while waiting:
        node = next((each for each in waiting if ready >= set(each.inputs)), None)
        assert node is not None, "fused nodes need each other"
        waiting.remove(node)
        nodes.append(node)
        ready |= set(node.outputs)
    return replace(program, nodes=tuple(nodes))


# -- what one kernel computes ----------------------------------------------------------------------


def join_products(program: Program) -> Program:
    """Fuse products of the same rows, and a gate with the two products that it joins, or with one
    that it joins with a part of another value.
    """
    uses, groups = Uses(program), list[tuple[str, list[Node]]]()
    alike: dict[tuple[str, tuple[int, ...]], list[Node]] = {}
    for node in program.nodes:
        if node.kind in PRODUCTS:
            alike.setdefault((node.kind, node.inputs), []).append(node)
    for node in program.nodes:
        gate = uses.maker(node.input("x")) if node.kind == "gated" else None
        if gate is None or gate.kind not in PRODUCTS:
            continue
        if uses.only_reader(gate.outputs[0]) is not node:
            continue
        same, up = alike[gate.kind, gate.inputs], uses.maker(node.input("y"))
        if len(same) == 1 and up is not None and up.kind in _READ_THROUGH:
            groups.append(("gated product", [gate, node]))
            same.clear()
        elif up in same and up is not gate and uses.only_reader(up.outputs[0]) is node:
            groups.append(("gated products", [gate, up, node]))
            same[:] = [each for each in same if each not in (gate, up)]
    groups += [("products", nodes) for nodes in alike.values() if len(nodes) > 1]
    return fuse(program, groups)


def join_heads(program: Program) -> Program:
    """Fuse attention with the norms and rotations of heads that only it reads."""
    uses, groups = Uses(program), list[tuple[str, list[Node]]]()
    for node in program.nodes:
        if node.kind == "attend":
            q, k = (
                _prepares_heads(program, uses, value=node.input(role), kinds=("rotate", "rms_norm"))
                for role in ("q", "k")
            )
            if node.input("k") is not None and [x.kind for x in q] != [x.kind for x in k]:
                q = k = []  # kernels do the same to queries and keys
            v = _prepares_heads(program, uses, value=node.input("v"), kinds=("rms_norm",))
            groups.append(("attention", [*q, *k, *v, node]))
    return fuse(program, groups)


def join_recurrences(program: Program) -> Program:
    """Fuse delta rules with the causal convolutions that only they read."""
    uses, gone, fused = Uses(program), set[Node](), dict[Node, Node]()
    for node in program.nodes:
        mixed = node.input("mixed") if node.kind == "delta_rule" else None
        before = None if mixed is None else uses.makers.get(mixed)
        if before is None or before.kind != "convolve":
            continue
        if uses.only_reader(before.outputs[0]) is node:
            inputs = dict.fromkeys((*before.inputs, *node.inputs))
            inputs.pop(before.outputs[0])
            gone.add(before)
            fused[node] = Node(
                FUSED,
                tuple(inputs),
                node.outputs,
                arguments=(before, node),
                attributes={"what": "recurrence"},
            )
    nodes = [fused.get(node, node) for node in program.nodes if node not in gone]
    return replace(program, nodes=tuple(nodes))


def join_routes(program: Program) -> Program:
    """Fuse routers with the casts of their logits that only they read."""
    uses, groups = Uses(program), list[tuple[str, list[Node]]]()
    for node in program.nodes:
        if node.kind == "route":
            cast = uses.maker(node.input("logits"))
            alone = cast is not None and cast.kind == "AsType"
            if alone and cast is not None and uses.only_reader(cast.outputs[0]) is not None:
                groups.append(("route", [cast, node]))
            else:
                groups.append(("route", [node]))
    return fuse(program, groups)


def split_experts(program: Program) -> Program:
    """Split `experts` nodes into the experts' outputs and their weighted sum.

    Each becomes `expert_outputs`, `[T, k, hidden]`, and `weighted_sum`, which a row kernel
    computes.
    """
    values, nodes = dict(program.values), list[Node]()
    for node in program.nodes:
        if node.kind != "experts":
            nodes.append(node)
            continue
        x, chosen, weights = (node.input(role) for role in ("x", "chosen", "weights"))
        assert x is not None, "experts read rows"
        assert chosen is not None, "experts are chosen"
        assert weights is not None, "experts are weighted"
        whole = values[node.outputs[0]]
        made = max(values) + 1
        values[made] = Value((*values[chosen].shape, whole.shape[-1]), whole.dtype)
        nodes += [
            Node(
                "expert_outputs",
                (x, chosen),
                outputs=(made,),
                roles=("x", "chosen"),
                attributes=node.attributes,
            ),
            Node("weighted_sum", (made, weights), outputs=node.outputs, roles=("x", "weights")),
        ]
    return replace(program, values=values, nodes=tuple(nodes))


def _prepares_heads(
    program: Program, uses: Uses, value: int | None, kinds: Sequence[str]
) -> list[Node]:
    """Return the nodes of these kinds, last one first, whose only use is to prepare heads."""
    found: list[Node] = []
    for kind in kinds:
        maker = uses.maker(value)
        if value is None or maker is None or maker.kind != kind:
            continue
        head_dim = program.values[value].shape[-1]
        by_head = program.values[maker.outputs[0]].shape[-1] == head_dim
        if not by_head or uses.only_reader(maker.outputs[0]) is None:
            break
        found.append(maker)
        value = maker.input("x")
    return found


NORMS = frozenset({"rms_norm", "layer_norm"})
_OF_ROWS = frozenset({*ELEMENTWISE, *NORMS, "activate", "gated", "weighted_sum"} - {"Arange"})


def join_rows(program: Program) -> Program:
    """Fuse nodes that one kernel with a row for each thread block can compute: elements, gates,
    norms, and a sum of ranks' rows that they read.

    All values of a region have the same number of elements a step, and its norms one width.
    """
    uses = Uses(program)
    region: dict[Node, tuple[Node, ...]] = {}
    after = _followers(program)
    place = {node: number for number, node in enumerate(program.nodes)}
    for node in program.nodes:
        if node.kind not in {*_OF_ROWS, "summed"} or _elements(program, node) is None:
            continue
        region[node] = (node,)
        if node.kind == "summed":
            continue  # all rows are computed before they are exchanged
        for value in node.inputs:
            maker = uses.maker(value)
            if maker is None or maker not in region:
                continue
            a, b = region[maker], region[node]
            if a is b or not _compatible(program, [*a, *b]) or _between(a, b, after, place=place):
                continue
            region.update(dict.fromkeys(a + b, a + b))
    distinct = dict.fromkeys(region.values())
    groups = [nodes for nodes in distinct if any(each.kind != "summed" for each in nodes)]
    return fuse(program, [("rows", nodes) for nodes in groups])


def _elements(program: Program, node: Node) -> tuple[Size, ...] | None:
    """Return the numbers of rows and of elements a row of a node's output.

    None if the output is not made of rows of fixed width, which row kernels need.
    """
    shape = program.values[node.outputs[0]].shape
    if (
        not shape
        or not isinstance(shape[0], Form)
        or not all(isinstance(n, int) for n in shape[1:])
    ):
        return None
    return shape[0], prod(n for n in shape[1:] if isinstance(n, int))


def _compatible(program: Program, nodes: Iterable[Node]) -> bool:
    widths, elements, sums = set[Size](), set[tuple[Size, ...] | None](), 0
    for node in nodes:
        elements.add(_elements(program, node))
        sums += node.kind == "summed"
        if node.kind in NORMS:
            widths.add(program.values[node.outputs[0]].shape[-1])
    return len(elements) == 1 and len(widths) <= 1 and sums <= 1


def _followers(program: Program) -> Mapping[Node, list[Node]]:
    """Return the nodes that read each node's outputs, and behind each node that uses pools the next
    one.
    """
    maker = {id: node for node in program.nodes for id in node.outputs}
    after: dict[Node, list[Node]] = {}
    last: Node | None = None
    for node in program.nodes:
        for value in node.inputs:
            if value in maker:
                after.setdefault(maker[value], []).append(node)
        if node.uses_pools:
            if last is not None:
                after.setdefault(last, []).append(node)
            last = node
    return after


def _between(
    a: Sequence[Node],
    b: Sequence[Node],
    after: Mapping[Node, list[Node]],
    place: Mapping[Node, int],
) -> bool:
    """Whether some node outside two groups depends on one of them and is needed by the other.

    Args:
        after: see `_followers`.
        place: the number of each node. Nothing behind both groups is needed.
    """
    inside = {*a, *b}
    end = max(place[each] for each in inside)

    def leads_back(start: Sequence[Node]) -> bool:
        pending = [n for each in start for n in after.get(each, ()) if n not in inside]
        seen = set[Node]()
        while pending:
            node = pending.pop()
            if node in seen or place[node] > end:
                continue
            seen.add(node)
            if not inside.isdisjoint(after.get(node, ())):
                return True
            pending += after.get(node, ())
        return False

    return leads_back(a) or leads_back(b)


def recordable(program: Program) -> Program:
    """Run all passes. The result is for executors that record kernels."""
    return prepared(split_experts(program))


def prepared(program: Program) -> Program:
    """Run the passes that leave a program's results as they are to the bit: all but
    `split_experts`.
    """
    return at_once(prepared_in_pieces(program))


def prepared_in_pieces(program: Program) -> Generator[None, None, Program]:
    """Run the passes of `prepared`, one in each piece."""
    passes: Sequence[Callable[[Program], Program]] = (
        simplified,
        join_products,
        join_heads,
        join_recurrences,
        join_routes,
        join_rows,
    )
    for each in passes:
        program = each(program)
        yield
    return program
