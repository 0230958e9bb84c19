"""Generates the CUDA kernel of products with matrices that tensor core kernels do not take.

One warp computes one element. It serves matrices with few or odd numbers of outputs, such as those
of routers and gates, in any codes. Sums do not depend on other rows.
"""

from __future__ import annotations

import mlx.core as mx

from quire.device.weights import PackedWeight
from quire.executor.graphs.operands import product_matrix
from quire.executor.graphs.rows.regions import Argument, RowKernel
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

_THREADS = 128
_EACH = 8
"""Number of neighbouring columns that a lane reads, where rows have a multiple of it."""
_FEW_OUTPUTS = 512
"""Most outputs of a matrix whose product is computed by one warp for each element."""


def plain_product_kernel(program: Program, node: Node) -> RowKernel:
    """Generate the kernel of a product of rows `[T, inputs]` with a matrix `[outputs, inputs]`.

    Raises:
        UnsupportedNode: the matrix is large, and tensor core kernels do not take it.
        NotGenerated: the matrix is coded otherwise, or its sizes are odd.
    """
    value, result = node.inputs[0], node.outputs[0]
    x, y = (program.values[each].dtype for each in (value, result))
    weight, bias = node.weight("weight"), node.weight("bias")
    arrays = _arrays(weight)
    outputs, inputs = arrays["w"].shape[0], _columns(weight)
    if outputs > _FEW_OUTPUTS:
        product_matrix(node)
    if {x, y} - {mx.bfloat16, mx.float32, mx.float16}:
        raise NotGenerated(f"columns of {x}")
    sum_of, kind = "sum", C_TYPES[y]
    if bias is not None:
        arrays["bias"], sum_of = bias, "number(as_y) + number(bias[n])"
    body = [
        "const int n = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;",
        "const int row = blockIdx.y;",
        "wait_for_others();",
        "if (row >= *rows || n >= OUTPUTS) return;",
        f"const {C_TYPES[x]}* from = x + (size_t)row * INPUTS;",
        "float sum = 0.f;",
        *(_by_element(weight, inputs) if inputs % _EACH else _by_vector(weight, x)),
        "#pragma unroll",
        "for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);",
        "if (lane) return;",
        f"{kind} as_y;",
        "put(as_y, sum);",
        f"put(y[(size_t)row * OUTPUTS + n], {sum_of});",
    ]
    parameters = [f"const {C_TYPES[x]}* x"]
    parameters += [f"const {WEIGHT_TYPES[each.dtype]}* {name}" for name, each in arrays.items()]
    constants = {"OUTPUTS": outputs, "INPUTS": inputs, "WARPS": _THREADS // 32}
    text = generated_source([*parameters, f"{kind}* y"], body, _THREADS, constants=constants)
    arguments = (Argument(value), *map(Argument, arrays.values()), Argument(result))
    blocks = -(-outputs * 32 // _THREADS)
    return RowKernel(text, arguments, _THREADS, grid=lambda max_rows: (blocks, max_rows, 1))


def _arrays(weight: mx.array | PackedWeight) -> dict[str, mx.array]:
    """Return the arrays of a matrix by the names of the kernel's parameters."""
    if not isinstance(weight, PackedWeight):
        return {"w": weight}
    found = {"w": weight.codes, "scales": weight.scales}
    return found if weight.biases is None else {**found, "biases": weight.biases}


def _columns(weight: mx.array | PackedWeight) -> int:
    if isinstance(weight, PackedWeight):
        return weight.scales.shape[-1] * weight.packing.group_size
    return weight.shape[1]


def _by_element(weight: mx.array | PackedWeight, inputs: int) -> list[str]:
    """Return the lines of a sum over columns, one by one."""
    if isinstance(weight, PackedWeight):
        raise NotGenerated(f"{inputs} columns in codes")
    product = "number(from[c]) * number(w[(size_t)n * INPUTS + c])"
    return [f"for (int c = lane; c < INPUTS; c += 32) sum += {product};"]


def _by_vector(weight: mx.array | PackedWeight, x: mx.Dtype) -> list[str]:
    """Return the lines of a sum over columns, `_EACH` at once."""
    kind = f"{C_TYPES[x]}, {16 // x.size}"
    return [
        f"for (int c = lane * {_EACH}; c < INPUTS; c += 32 * {_EACH}) {{",
        f"Pack<{kind}> given[{_EACH * x.size // 16}];",
        f"load<{kind}, {_EACH}>(given, from + c, true);",
        *_products(weight, x),
        "}",
    ]


def _products(weight: mx.array | PackedWeight, x: mx.Dtype) -> list[str]:
    """Return C lines that add the products of a lane's columns from `c` on to `sum`."""
    each = f"number(given[i / {16 // x.size}].at[i % {16 // x.size}])"
    loop = ["#pragma unroll", f"for (int i = 0; i < {_EACH}; i++) {{"]
    if not isinstance(weight, PackedWeight):
        return [*loop, f"sum += {each} * number(w[(size_t)n * INPUTS + c + i]);", "}"]
    packing = weight.packing
    if weight.tiled or packing.bits not in CODE_BITS:
        raise NotGenerated(f"codes of {packing.bits} bits in mode {packing.mode}")
    bits, words = packing.bits, weight.codes.shape[-1]
    group = f"(size_t)n * {weight.scales.shape[-1]} + c / {packing.group_size}"
    if weight.biases is None:
        floats = FLOAT_CODES[packing.mode]
        lines = [f"const float scale = {floats.scale}(scales[{group}]);"]
        number = f"{floats.code}(code & {(1 << bits) - 1}u) * scale"
    else:
        lines = [f"const float scale = number(scales[{group}]), low = number(biases[{group}]);"]
        number = f"(float)(code & {(1 << bits) - 1}u) * scale + low"
    code = code_lines("(c + i)", bits, lambda at: f"w[(size_t)n * {words} + {at}]")
    return [*lines, *loop, *code, f"sum += {each} * ({number});", "}"]
