"""Holds exchanges of ranks against the expected rows before any step depends on them."""

from __future__ import annotations

from functools import cache, partial

import mlx.core as mx

from quire.device.cuda.compiled import compiler
from quire.device.cuda.driver import Card, DriverError, card
from quire.device.cuda.extension import NoExtension, load_extension
from quire.device.cuda.inboxes import Inboxes, open_inboxes
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.ranks import Part, agreed
from quire.executor.graphs.attention.coding_check import DeviceRunner, KernelRunner
from quire.executor.graphs.products import product_kernels
from quire.executor.graphs.ranks.exchange import Exchange
from quire.executor.graphs.recorder import Kernel
from quire.executor.graphs.rows.regions import row_kernel
from quire.program.values import ROWS, Node, Program, Value

_ROWS, _FEW_ROWS, _INPUTS, _WIDTH = 40, 8, 64, 8192
_POLLS = 1 << 22
"""Looks at a flag: some seconds. Later exchanges wait without end."""
_TIMES = 3


@cache
def verified_inboxes(part: Part) -> Inboxes:
    """Open the ranks' inboxes, and hold exchanges against the expected rows. All ranks call it at
    the same point.

    Raises:
        DriverError: on every rank, if some rank cannot reach another's memory, or rows are wrong.
    """
    inboxes = open_inboxes(part)
    try:
        known = compiler()
        kernels = [_kernel(part, gathered) for gathered in (False, True)]
        sums = SumKernels(inboxes, card(), polls=_POLLS)
        known.functions([*(each.text for each in kernels), *sums.sources])
        problem, runner = "", DeviceRunner(known, load_extension())
    except (DriverError, NoExtension) as error:
        problem = str(error)
    if not agreed(int(not problem), part):
        raise DriverError(problem or "another rank cannot compile the exchange of rows")
    checks = [partial(wrong_rows, each, inboxes, runner) for each in kernels]
    for check in _TIMES * [*checks, partial(sums.wrong, runner)]:
        try:
            problem = problem or check()
        except (DriverError, RuntimeError) as error:
            problem = str(error)
    if not agreed(int(not problem), part):
        raise DriverError(problem or "another rank got wrong rows")
    return inboxes


def wrong_rows(kernel: Exchange, inboxes: Inboxes, runner: KernelRunner) -> str:
    """Run an exchange of small whole numbers. Return what is wrong with the result, or ""."""
    part, dtype, width = inboxes.part, kernel.dtype, kernel.width
    numbers = mx.arange(kernel.max_rows * width).reshape(-1, width) % 29
    ranks = [(numbers + rank).astype(dtype) for rank in range(part.size)]
    expected = mx.concatenate(ranks, axis=-1) if kernel.gathered else sum(ranks[1:], ranks[0])
    y, rows = mx.zeros(expected.shape, dtype), mx.array([kernel.max_rows])
    mx.eval(y, rows, expected, *ranks)
    arrays = rows, inboxes.table, ranks[part.rank], y
    arguments = tuple(map(runner.address, arrays))
    runner.run(Kernel(kernel.text, kernel.grid, kernel.threads, shared=0, arguments=arguments))
    if mx.array_equal(y, expected).item():
        return ""
    what = "columns side by side" if kernel.gathered else "sum"
    return f"the ranks' {what}, exchanged through their memory, is wrong"


class SumKernels:
    """A product that sends its rows, and the row kernel that sums those of all ranks."""

    def __init__(self, inboxes: Inboxes, card: Card, polls: int = 0) -> None:
        self._inboxes = inboxes
        self._gemm = SkinnyGemm(_INPUTS, _WIDTH, _INPUTS, rows=_FEW_ROWS, card=card, bits=16)
        self._product = product_kernels.linear(
            self._gemm, (_WIDTH,), offsets=False, inboxes=inboxes
        )
        value = Value((ROWS, _WIDTH), mx.bfloat16)
        node = Node("summed", (0,), (1,), roles=("x",), attributes={"part": inboxes.part})
        program = Program(
            symbols=("T",),
            fields={"x": 0},
            constants={},
            values={0: value, 1: value},
            nodes=(node,),
            outputs=(1,),
        )
        self._sum = row_kernel(program, node, inboxes, polls=polls)

    @property
    def sources(self) -> tuple[str, str]:
        return self._product, self._sum.text

    def wrong(self, runner: KernelRunner) -> str:
        """Run both on small whole numbers. Return what is wrong with the sum, or ""."""
        part, gemm = self._inboxes.part, self._gemm
        numbers = mx.arange(_FEW_ROWS * _INPUTS).reshape(-1, _INPUTS) % 29
        x, times = (numbers + part.rank).astype(mx.bfloat16), _WIDTH // _INPUTS
        w = mx.tile(mx.eye(_INPUTS, dtype=mx.bfloat16), (times, 1))  # its products are copies of x
        total = mx.tile(numbers * part.size + sum(range(part.size)), (1, times))
        y, found = (mx.zeros((_FEW_ROWS, _WIDTH), mx.bfloat16) for _ in range(2))
        rows = mx.array([_FEW_ROWS])
        mx.eval(x, w, total, y, found, rows)
        arrays = rows, x, w, y, self._inboxes.table
        grid = gemm.grid(-(-_WIDTH // gemm.width))
        arguments = tuple(map(runner.address, arrays))
        runner.run(
            Kernel(self._product, grid, gemm.threads, shared=gemm.shared, arguments=arguments)
        )
        arguments = tuple(map(runner.address, (rows, y, found, self._inboxes.table)))
        grid, threads = self._sum.grid(_FEW_ROWS), self._sum.threads
        runner.run(Kernel(self._sum.text, grid, threads, shared=0, arguments=arguments))
        if mx.array_equal(found, total.astype(mx.bfloat16)).item():
            return ""
        return "the sum of rows that products send through the ranks' memory is wrong"


def _kernel(part: Part, gathered: bool) -> Exchange:
    dtype = mx.float32 if gathered else mx.bfloat16
    return Exchange(part, dtype, _WIDTH, max_rows=_ROWS, gathered=gathered, polls=_POLLS)
