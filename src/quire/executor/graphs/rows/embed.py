"""Generates the CUDA kernels that look up rows of a table of numbers or codes, or of a value."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quire.device.weights import TILE, PackedWeight
from quire.executor.graphs.rows.accesses import Rows
from quire.executor.graphs.rows.arithmetic import rounded
from quire.executor.graphs.rows.regions import Argument, RowKernel
from quire.executor.graphs.rows.row_body import LINE, Cut
from quire.executor.graphs.source import (
    C_TYPES,
    CODE_BITS,
    FLOAT_CODES,
    WEIGHT_TYPES,
    NotGenerated,
    code_lines,
    generated_source,
)
from quire.program.values import Node, Program

_HEAD = [
    "const int at = blockIdx.x * GROUPS + threadIdx.x / LANES;",
    "const int row = at / PARTS, part = at % PARTS, lane = threadIdx.x % LANES;",
    "const int c = lane * V, r = part * PART + c;",
    "wait_for_others();",
]


def embed_kernel(program: Program, node: Node) -> RowKernel:
    """Generate the kernel of an `embed` node.

    Raises:
        NotGenerated: no kernel reads the table's codes, or its type is not known.
    """
    (out,) = node.outputs
    dtype = program.values[out].dtype
    tokens = program.values[node.inputs[0]]
    if len(tokens.shape) != 1 or tokens.dtype not in (mx.int32, mx.uint32):
        raise NotGenerated(f"tokens are {tokens}")
    table = node.weight("table")
    if dtype not in C_TYPES:
        raise NotGenerated(f"{dtype} is not computed")
    decode = list[str]()
    if isinstance(table, PackedWeight):
        arrays, decode = _codes(table, dtype)
    elif table.dtype != dtype:
        raise NotGenerated(f"rows of {table.dtype} are given as {dtype}")
    else:
        arrays = [table]
    types = [WEIGHT_TYPES[each.dtype] for each in arrays]
    return _looked_up(program, node, node.inputs[0], table=arrays, types=types, decode=decode)


def gathered_kernel(program: Program, node: Node) -> RowKernel:
    """Generate the kernel of a `Gather` node that takes whole rows of a value by their numbers.

    Raises:
        NotGenerated: it takes something else, or rows of a type that is not known.
    """
    source, numbers = node.inputs[0], node.inputs[-1]
    table, index = program.values[source], program.values[numbers]
    whole = node.arguments == ((0,), (1, *table.shape[1:]))
    if not whole or len(index.shape) != 1 or index.dtype != mx.int32:
        raise NotGenerated("a gather of other than whole rows")
    if table.dtype not in C_TYPES:
        raise NotGenerated(f"rows of {table.dtype} are not gathered")
    return _looked_up(program, node, numbers, table=[source], types=[C_TYPES[table.dtype]])


def _looked_up(
    program: Program,
    node: Node,
    numbers: int,
    *,
    table: Sequence[int | mx.array],
    types: Sequence[str],
    decode: Sequence[str] = (),
) -> RowKernel:
    """Return the kernel that writes rows of a table.

    Args:
        numbers: the value with the rows' numbers in the table.
        table: the table's arrays, of C types `types`.
        decode: C lines that read one thread's elements of row `token`, if they are codes.
    """
    (out,) = node.outputs
    rows, dtype = Rows(program, node.fused, out), program.values[out].dtype
    cut, index = Cut.of(rows.width, norm=None), program.values[numbers].dtype
    inside = cut.inside.replace("there", "row < *rows")
    many = min(cut.vector, LINE // dtype.size)
    kind = f"{C_TYPES[dtype]}, {many}"
    read = [f"load<{kind}, V>(found, table0 + token * WIDTH + r, true);"]
    body = [*_HEAD, f"if (row >= *rows || !({inside})) return;"]
    body += [
        "const size_t token = tokens[row];",
        f"Pack<{kind}> found[V / {many}];",
        *(decode or read),
    ]
    body += [f"store<{kind}, V>(out0 + (size_t)row * WIDTH + r, found);"]
    parameters = [f"const {C_TYPES[index]}* tokens"]
    parameters += [f"const {each}* table{n}" for n, each in enumerate(types)]
    parameters += [f"{C_TYPES[dtype]}* out0"]
    text = generated_source(parameters, body, cut.lanes * cut.groups, constants=cut.constants)
    arguments = (Argument(numbers), *map(Argument, table), Argument(out))
    return RowKernel(text, arguments, cut.lanes * cut.groups, grid=cut.grid)


def _codes(table: PackedWeight, dtype: mx.Dtype) -> tuple[list[mx.array], list[str]]:
    """Return the arrays of a coded table, and the C lines that decode one thread's elements.

    A row is a stream of bits; each row starts a new stream.
    """
    bits, size = table.packing.bits, table.packing.group_size
    if bits not in CODE_BITS:
        raise NotGenerated(f"a table of codes of {bits} bits")
    words, groups = table.codes.shape[-1], table.scales.shape[-1]
    group = _place(f"(r + i) / {size}", groups, table.tiled)
    code_bits, arrays = f"code & {(1 << bits) - 1}u", [table.codes, table.scales]
    if table.biases is None:
        floats = FLOAT_CODES[table.packing.mode]
        value = rounded(f"{floats.code}({code_bits}) * {floats.scale}(table1[group])", dtype)
    else:
        arrays.append(table.biases)
        scale, bias = (rounded(f"number(table{n}[group])", dtype) for n in (1, 2))
        value = rounded(f"(float)({code_bits}) * {scale} + {bias}", dtype)
    many = LINE // dtype.size
    lines = ["#pragma unroll", "for (int i = 0; i < V; i++) {"]
    lines += code_lines("(r + i)", bits, lambda n: f"table0[{_place(n, words, table.tiled)}]")
    lines += [f"const size_t group = {group};"]
    place = f"found[i / (V < {many} ? V : {many})].at[i % (V < {many} ? V : {many})]"
    return arrays, [*lines, f"put({place}, {value});", "}"]


def _place(number: str, width: int, tiled: bool) -> str:
    """Return a C expression for the index of a token's element in an array of `width` columns."""
    if not tiled:
        return f"token * {width} + {number}"
    return f"(token / {TILE} * {width} + {number}) * {TILE} + token % {TILE}"
