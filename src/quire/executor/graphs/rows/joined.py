"""Generates the CUDA kernel that joins arrays along an axis."""

from __future__ import annotations

from math import prod

from quire.executor.graphs.rows.accesses import Access, Rows
from quire.executor.graphs.rows.regions import Argument, RowKernel
from quire.executor.graphs.rows.row_body import Body, Cut, Leaf, Stored, Term
from quire.executor.graphs.source import C_TYPES, NotGenerated, generated_source
from quire.program.primitives import VIEWS
from quire.program.values import Node, Program


def joined_kernel(program: Program, node: Node) -> RowKernel:
    """Generate the kernel of a `Concatenate` node, or of a region of one and views that it reads.

    Raises:
        NotGenerated: rows are joined, or arrays of elements whose type is not known.
    """
    region = node.fused
    (join,) = (each for each in region.arguments if each.kind not in VIEWS)
    (out,) = join.outputs
    value, axis = program.values[out], join.arguments[0] % len(program.values[out].shape)
    if join.kind != "Concatenate" or value.dtype not in C_TYPES:
        raise NotGenerated(f"{join.kind} of {value}")
    if not all(isinstance(size, int) for size in value.shape[axis:]):
        raise NotGenerated("rows are joined")
    inner = prod(size for size in value.shape[axis:] if isinstance(size, int))
    whole, start = Rows(program, region, out), 0
    lines, arguments, cuts = list[str](), list[Argument](), list[Cut]()
    parts = {id: Rows(program, region, id) for id in join.inputs}
    filled = [(id, parts[id]) for id in join.inputs if parts[id].width]
    for number, (id, own) in enumerate(filled):
        access, root = own.access(id), own.root(id)
        together = inner * own.width // whole.width
        to = Access(start, whole.width, ((together, 1), (own.width // together, inner)))
        cut = Cut.of(own.width, norm=None, together=together)
        leaf = Leaf(number, value.dtype, access, fixed=root in program.constants)
        body = Body(cut, [leaf], [], sums=[]).lines(
            [Stored(0, Term(f"a{number}", 0), value.dtype, access=to)]
        )
        lines += [f"if (blockIdx.y == {number}) {{"]
        lines += [f"constexpr int {name} = {size};" for name, size in cut.constants.items()]
        lines += ["if (threadIdx.x >= LANES * GROUPS) return;", *body, "}"]
        arguments.append(Argument(root, access.offset * value.dtype.size))
        cuts.append(cut)
        start += together
    kind, threads = C_TYPES[value.dtype], max(cut.lanes * cut.groups for cut in cuts)
    parameters = [f"const {kind}* in{number}" for number in range(len(cuts))] + [f"{kind}* out0"]
    text = generated_source(parameters, lines, threads, constants={})

    def grid(max_rows: int) -> tuple[int, int, int]:
        return max(cut.grid(max_rows)[0] for cut in cuts), len(cuts), 1

    return RowKernel(text, (*arguments, Argument(out)), threads, grid=grid)
