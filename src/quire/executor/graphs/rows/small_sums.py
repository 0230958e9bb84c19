"""Generates CUDA kernels of small sums within a row: reductions of an axis, and tiny products."""

from __future__ import annotations

from math import prod

from quire.executor.graphs.rows.accesses import Rows
from quire.executor.graphs.rows.regions import Argument, RowKernel
from quire.executor.graphs.rows.row_body import Cut
from quire.executor.graphs.source import C_TYPES, ROUNDED, NotGenerated, generated_source
from quire.program.values import Node, Program, Size

_THREADS = 128
_MANY = 32
"""Summands from which on a warp adds them up, instead of a thread."""
_MOST_TERMS = 64
"""Most summands of an element of a product."""
_JOINS = {2: ("0.f", "{0} + {1}"), 4: ("INFINITY", "fminf({0}, {1})")}
_JOINS[5] = ("-INFINITY", "fmaxf({0}, {1})")
"""By MLX's number of a reduction: what it starts with, and how two floats are joined."""


def reduced_kernel(program: Program, node: Node) -> RowKernel:
    """Generate the kernel of a sum, a maximum or a minimum over one axis within rows.

    Raises:
        NotGenerated: the node reduces otherwise.
    """
    kind, axes = node.arguments
    (x,) = node.inputs
    shape = program.values[x].shape
    if kind not in _JOINS or len(axes) != 1 or axes[0] == 0:
        raise NotGenerated("a reduction over rows, over several axes, or of another kind")
    count, inner = _fixed(shape[axes[0] : axes[0] + 1]), _fixed(shape[axes[0] + 1 :])
    outer, lanes = _fixed(shape[1 : axes[0]]), 32 if count >= _MANY else 1
    start, join = _JOINS[kind]
    constants = {"OUTPUTS": outer * inner, "INNER": inner, "COUNT": count}
    shuffled = "__shfl_xor_sync(0xffffffffu, sum, by)"
    body = [
        "const size_t begin = (size_t)row * OUTPUTS * COUNT + o / INNER * COUNT * INNER;",
        f"float sum = {start};",
        f"for (int i = lane; i < COUNT; i += {lanes}) {{",
        "const float each = number(in0[begin + (size_t)i * INNER + o % INNER]);",
        f"sum = {join.format('sum', 'each')};",
        "}",
    ]
    if lanes > 1:
        body += ["#pragma unroll", "for (int by = 16; by > 0; by /= 2)"]
        body += [f"  sum = {join.format('sum', shuffled)};"]
    return _kernel(program, node, constants, body=body, lanes=lanes)


def small_product_kernel(program: Program, node: Node) -> RowKernel:
    """Generate the kernel of `[T, m, k] @ [T, k, n]`, a product for each row.

    Raises:
        NotGenerated: the node multiplies otherwise, or sums are long.
    """
    a, b = (program.values[each].shape for each in node.inputs)
    if len(a) != 3 or len(b) != 3 or a[0] != b[0]:
        raise NotGenerated("a product that is not by rows")
    m, k, n = _fixed(a[1:2]), _fixed(a[2:]), _fixed(b[2:])
    if k > _MOST_TERMS:
        raise NotGenerated(f"a product by rows with sums of {k}")
    body = [
        "const size_t left = (size_t)row * M * K + o / N * K;",
        "const size_t right = (size_t)row * K * N + o % N;",
        "float sum = 0.f;",
        "#pragma unroll",
        "for (int i = 0; i < K; i++) sum += number(in0[left + i]) * number(in1[right + i * N]);",
    ]
    return _kernel(program, node, {"OUTPUTS": m * n, "M": m, "K": k, "N": n}, body=body, lanes=1)


def _kernel(
    program: Program, node: Node, constants: dict[str, int], body: list[str], lanes: int
) -> RowKernel:
    """Return the kernel whose `body` computes `sum`, element `o` of a row, with `lanes` threads."""
    rows = Rows(program, node.fused, node.outputs[0])
    if {program.values[id].dtype for id in (*node.inputs, *node.outputs)} - ROUNDED.keys():
        raise NotGenerated("a sum of numbers that are no floats")
    if rows.width != constants["OUTPUTS"]:
        raise NotGenerated("rows are not the first axis")
    groups = _THREADS // lanes
    cut = Cut(rows.width, 1, 1, per=1, lanes=lanes, groups=groups)
    kinds = [C_TYPES[program.values[id].dtype] for id in (*node.inputs, *node.outputs)]
    parameters = [f"const {kind}* in{number}" for number, kind in enumerate(kinds[:-1])]
    lines = [
        f"const int at = blockIdx.x * {groups} + threadIdx.x / {lanes};",
        f"const int row = at / OUTPUTS, o = at % OUTPUTS, lane = threadIdx.x % {lanes};",
        "wait_for_others();",
        "if (row >= *rows) return;",
        *body,
        "if (lane == 0) put(out0[(size_t)row * OUTPUTS + o], sum);",
    ]
    text = generated_source(
        [*parameters, f"{kinds[-1]}* out0"], lines, _THREADS, constants=constants
    )
    arguments = tuple(map(Argument, (*node.inputs, *node.outputs)))
    return RowKernel(text, arguments, _THREADS, grid=cut.grid)


def _fixed(sizes: tuple[Size, ...]) -> int:
    """Return the product of sizes that do not depend on the number of rows."""
    fixed = [size for size in sizes if isinstance(size, int)]
    if len(fixed) != len(sizes):
        raise NotGenerated("rows are not the first axis")
    return prod(fixed)
