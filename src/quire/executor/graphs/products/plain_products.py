"""Generates the CUDA kernel of products with matrices that tensor core kernels do not take.

One warp computes one element. It serves matrices with few or odd numbers of outputs, such as those
of routers and gates, in any codes. Sums do not depend on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from quire.device.weights import PackedWeight
from quire.executor.graphs.source import (
    C_TYPES,
    CODE_BITS,
    FLOAT_CODES,
    WEIGHT_TYPES,
    NotGenerated,
    code_lines,
    source_text,
)

_THREADS = 128
_EACH = 8
"""Number of neighbouring columns that a lane reads, where rows have a multiple of it."""


@dataclass(frozen=True, slots=True)
class PlainProduct:
    """The product of rows `[T, inputs]` with a matrix.

    Attributes:
        x, y: types of input and output.
        weight: `[outputs, inputs]`, or codes.
        bias: `[outputs]`.
    """

    x: mx.Dtype
    y: mx.Dtype
    weight: mx.array | PackedWeight
    bias: mx.array | None

    @property
    def outputs(self) -> int:
        return self._matrix.shape[0]

    @property
    def inputs(self) -> int:
        if isinstance(self.weight, PackedWeight):
            return self.weight.scales.shape[-1] * self.weight.packing.group_size
        return self.weight.shape[1]

    @property
    def _matrix(self) -> mx.array:
        return self.weight.codes if isinstance(self.weight, PackedWeight) else self.weight

    @property
    def arrays(self) -> list[mx.array]:
        """The weight arrays, passed after rows and x. y is the last argument."""
        found = [self._matrix]
        if isinstance(self.weight, PackedWeight):
            found += [self.weight.scales]
            found += [] if self.weight.biases is None else [self.weight.biases]
        return found if self.bias is None else [*found, self.bias]

    @property
    def threads(self) -> int:
        return _THREADS

    def grid(self, max_rows: int) -> tuple[int, int, int]:
        """Return the number of thread blocks for up to `max_rows` rows."""
        return -(-self.outputs * 32 // _THREADS), max_rows, 1

    @property
    def text(self) -> str:
        """Return the source.

        Raises:
            NotGenerated: the matrix is coded otherwise, or its sizes are odd.
        """
        if {self.x, self.y} - {mx.bfloat16, mx.float32, mx.float16}:
            raise NotGenerated(f"columns of {self.x}")
        x, y = C_TYPES[self.x], C_TYPES[self.y]
        names = ["w", "scales", "biases"][: len(self.arrays) - (self.bias is not None)]
        names += ["bias"] * (self.bias is not None)
        parameters = [f"const {x}* x"]
        parameters += [
            f"const {WEIGHT_TYPES[array.dtype]}* {name}"
            for name, array in zip(names, self.arrays, strict=True)
        ]
        sum_of = "sum" if self.bias is None else "number(as_y) + number(bias[n])"
        body = [
            "const int n = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;",
            "const int row = blockIdx.y;",
            "wait_for_others();",
            "if (row >= *rows || n >= OUTPUTS) return;",
            f"const {x}* from = x + (size_t)row * INPUTS;",
            "float sum = 0.f;",
            *(self._by_element() if self.inputs % _EACH else self._by_vector()),
            "#pragma unroll",
            "for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);",
            "if (lane) return;",
            f"{y} as_y;",
            "put(as_y, sum);",
            f"put(y[(size_t)row * OUTPUTS + n], {sum_of});",
        ]
        constants = {"OUTPUTS": self.outputs, "INPUTS": self.inputs, "WARPS": _THREADS // 32}
        return source_text([*parameters, f"{y}* y"], body, _THREADS, constants=constants)

    def _by_element(self) -> list[str]:
        """Return the lines of a sum over columns, one by one."""
        if isinstance(self.weight, PackedWeight):
            raise NotGenerated(f"{self.inputs} columns in codes")
        product = "number(from[c]) * number(w[(size_t)n * INPUTS + c])"
        return [f"for (int c = lane; c < INPUTS; c += 32) sum += {product};"]

    def _by_vector(self) -> list[str]:
        """Return the lines of a sum over columns, `_EACH` at once."""
        kind = f"{C_TYPES[self.x]}, {16 // self.x.size}"
        return [
            f"for (int c = lane * {_EACH}; c < INPUTS; c += 32 * {_EACH}) {{",
            f"Pack<{kind}> given[{_EACH * self.x.size // 16}];",
            f"load<{kind}, {_EACH}>(given, from + c, true);",
            *self._products(),
            "}",
        ]

    def _products(self) -> list[str]:
        """Return C lines that add the products of a lane's columns from `c` on to `sum`."""
        each = f"number(given[i / {16 // self.x.size}].at[i % {16 // self.x.size}])"
        loop = ["#pragma unroll", f"for (int i = 0; i < {_EACH}; i++) {{"]
        if not isinstance(self.weight, PackedWeight):
            return [*loop, f"sum += {each} * number(w[(size_t)n * INPUTS + c + i]);", "}"]
        packing = self.weight.packing
        if self.weight.tiled or packing.bits not in CODE_BITS:
            raise NotGenerated(f"codes of {packing.bits} bits in mode {packing.mode}")
        bits, words = packing.bits, self.weight.codes.shape[-1]
        group = f"(size_t)n * {self.weight.scales.shape[-1]} + c / {packing.group_size}"
        if self.weight.biases is None:
            floats = FLOAT_CODES[packing.mode]
            lines = [f"const float scale = {floats.scale}(scales[{group}]);"]
            number = f"{floats.code}(code & {(1 << bits) - 1}u) * scale"
        else:
            lines = [f"const float scale = number(scales[{group}]), low = number(biases[{group}]);"]
            number = f"(float)(code & {(1 << bits) - 1}u) * scale + low"
        code = code_lines("(c + i)", bits, lambda at: f"w[(size_t)n * {words} + {at}]")
        return [*lines, *loop, *code, f"sum += {each} * ({number});", "}"]
