"""Generates and records the CUDA kernels that add low-rank products of adapters to rows.

Each row has factors of its own, chosen by a number that the kernels read: the same graph serves any
choice of adapters. The first kernel multiplies rows by the first factors, the second one multiplies
the few results by the second factors and adds the model's own product. Sums do not depend on other
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.places import NodeKinds, ValueRecording, shown
from quire.executor.graphs.source import C_TYPES, NotGenerated, generated_source
from quire.program.values import Node

THREADS = 128
_EACH = 8
"""Number of neighbouring columns that a thread reads, where rows have a multiple of it."""


@dataclass(frozen=True, slots=True)
class LowRankProduct:
    """The low-rank products of rows `[T, inputs]`, added to rows `[T, outputs]`.

    Attributes:
        x, y: types of the rows.
        inner, outer: first and second factors, `[n, rank, inputs]` and `[n, rank, outputs]`. Those
            of number 0 are zeros and not read.
    """

    x: mx.Dtype
    y: mx.Dtype
    inner: mx.array
    outer: mx.array

    @property
    def rank(self) -> int:
        return self.inner.shape[1]

    def first_grid(self, max_rows: int) -> tuple[int, int, int]:
        """Return the thread blocks of the first kernel: one for each element of its result."""
        return self.rank, max_rows, 1

    def second_grid(self, max_rows: int) -> tuple[int, int, int]:
        """Return the thread blocks of the second kernel."""
        return -(-self.outer.shape[-1] // (THREADS * self._outputs_each)), max_rows, 1

    @property
    def first(self) -> str:
        """The source of the first kernel. Parameters: rows, x, numbers, first factors, and the
        result, float32 `[T, rank]`.

        Raises:
            NotGenerated: rows or factors have another type.
        """
        x, factor = self._types(self.x, self.inner.dtype)
        inputs = self.inner.shape[-1]
        each = _EACH if inputs % _EACH == 0 else 1
        body = [
            "const int r = blockIdx.x, row = blockIdx.y;",
            "__shared__ float found[32];",
            "wait_for_others();",
            "if (row >= *rows || numbers[row] == 0) return;",
            f"const {x}* from = x + (size_t)row * INPUTS;",
            f"const {factor}* factors = inner + ((size_t)numbers[row] * RANK + r) * INPUTS;",
            "float sum[1] = {0.f};",
            "#pragma unroll 4",
            "for (int c = threadIdx.x * EACH; c < INPUTS; c += THREADS * EACH) {",
            f"Pack<{x}, EACH> given[1];",
            f"Pack<{factor}, EACH> by[1];",
            f"load<{x}, EACH, EACH>(given, from + c, true);",
            f"load<{factor}, EACH, EACH>(by, factors + c, true);",
            "#pragma unroll",
            "for (int i = 0; i < EACH; i++)",
            "sum[0] += number(given[0].at[i]) * number(by[0].at[i]);",
            "}",
            "sum_up<THREADS, 1>(sum, found);",
            "if (threadIdx.x == 0) low[(size_t)row * RANK + r] = sum[0];",
        ]
        parameters = [f"const {x}* x", "const int* numbers", f"const {factor}* inner", "float* low"]
        constants = {"INPUTS": inputs, "RANK": self.rank, "EACH": each, "THREADS": THREADS}
        return generated_source(parameters, body, THREADS, constants=constants)

    @property
    def second(self) -> str:
        """The source of the second kernel. Parameters: rows, the model's product, the first
        kernel's result, numbers, second factors, and the result.

        Raises:
            NotGenerated: rows or factors have another type.
        """
        y, factor = self._types(self.y, self.outer.dtype)
        body = [
            "const int n = (blockIdx.x * THREADS + threadIdx.x) * EACH, row = blockIdx.y;",
            "wait_for_others();",
            "if (row >= *rows || n >= OUTPUTS) return;",
            f"Pack<{y}, EACH> own[1];",
            f"load<{y}, EACH, EACH>(own, plain + (size_t)row * OUTPUTS + n, true);",
            "if (numbers[row] != 0) {",
            f"const {factor}* factors = outer + (size_t)numbers[row] * RANK * OUTPUTS + n;",
            "float sums[EACH] = {};",
            "#pragma unroll 8",
            "for (int r = 0; r < RANK; r++) {",
            f"Pack<{factor}, EACH> by[1];",
            f"load<{factor}, EACH, EACH>(by, factors + (size_t)r * OUTPUTS, true);",
            "const float given = low[(size_t)row * RANK + r];",
            "#pragma unroll",
            "for (int i = 0; i < EACH; i++) sums[i] += given * number(by[0].at[i]);",
            "}",
            "#pragma unroll",
            "for (int i = 0; i < EACH; i++) put(own[0].at[i], number(own[0].at[i]) + sums[i]);",
            "}",
            f"store<{y}, EACH, EACH>(y + (size_t)row * OUTPUTS + n, own);",
        ]
        parameters = [f"const {y}* plain", "const float* low", "const int* numbers"]
        parameters += [f"const {factor}* outer", f"{y}* y"]
        sizes = {"OUTPUTS": self.outer.shape[-1], "RANK": self.rank}
        constants = {**sizes, "EACH": self._outputs_each, "THREADS": THREADS}
        return generated_source(parameters, body, THREADS, constants=constants)

    @property
    def _outputs_each(self) -> int:
        """Number of neighbouring outputs of a thread."""
        return 4 if self.outer.shape[-1] % 4 == 0 else 1

    def _types(self, *dtypes: mx.Dtype) -> tuple[str, ...]:
        if set(dtypes) - {mx.bfloat16, mx.float16, mx.float32}:
            raise NotGenerated(f"low-rank products of {', '.join(map(str, dtypes))}")
        return tuple(C_TYPES[each] for each in dtypes)


class LowRankRecording(ValueRecording):
    """Records low-rank products; see `program.low_rank`."""

    @property
    def kinds(self) -> NodeKinds:
        return {**super().kinds, "add_low_rank": self._low_rank}

    def _low_rank(self, node: Node) -> None:
        plain, x, numbers = node.inputs
        (y,), recorder = node.outputs, self._recorder
        inner, outer = node.weight("inner"), node.weight("outer")
        types = self._program.values[x].dtype, self._program.values[y].dtype
        product = LowRankProduct(*types, inner=inner, outer=outer)
        try:
            first, second = product.first, product.second
        except NotGenerated as error:
            raise UnsupportedNode(f"{shown(self._program, node)}: {error}") from error
        step, chosen = recorder.rows, self._place(numbers).address
        reads = self._read([x])
        low = recorder.buffer(4 * recorder.max_rows * product.rank, reads)
        arguments = [step, self._place(x).address, chosen, recorder.weight(product.inner)]
        recorder.add(
            first,
            product.first_grid(recorder.max_rows),
            THREADS,
            arguments=[*arguments, low.address],
            reads=reads,
            writes=[low],
        )
        reads = [*self._read([plain]), low]
        to = self._written(y, reads)
        arguments = [step, self._place(plain).address, low.address, chosen]
        recorder.add(
            second,
            product.second_grid(recorder.max_rows),
            THREADS,
            arguments=[*arguments, recorder.weight(product.outer), to.address],
            reads=reads,
            writes=[to],
        )
        recorder.release(low)
