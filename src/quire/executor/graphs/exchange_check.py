"""Holds exchanges of ranks against the expected rows before any step depends on them."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from quire.device.cuda.compiled import compiler
from quire.device.cuda.driver import DriverError
from quire.device.cuda.extension import NoExtension, load_extension
from quire.device.cuda.inboxes import Inboxes, open_inboxes
from quire.device.ranks import Part, agreed
from quire.executor.graphs.coding_check import DeviceRunner, KernelRunner
from quire.executor.graphs.exchange import Exchange
from quire.executor.graphs.recorder import Kernel

_ROWS, _WIDTH = 40, 8192
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
        known.functions([each.text for each in kernels])
        problem, runner = "", DeviceRunner(known, load_extension())
    except (DriverError, NoExtension) as error:
        problem = str(error)
    if not agreed(int(not problem), part):
        raise DriverError(problem or "another rank cannot compile the exchange of rows")
    for kernel in _TIMES * kernels:
        try:
            problem = problem or wrong_rows(kernel, inboxes, runner)
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


def _kernel(part: Part, gathered: bool) -> Exchange:
    dtype = mx.float32 if gathered else mx.bfloat16
    return Exchange(part, dtype, _WIDTH, max_rows=_ROWS, gathered=gathered, polls=_POLLS)
