"""Runs the kernels of recorded steps on the CPU, one after the other."""

from __future__ import annotations

import re
from functools import cache

import mlx.core as mx
import numpy as np

from quire.device.gpu_kernels import Kernel as MXKernel
from quire.executor.graphs.attention.coding_check import KernelRunner
from quire.executor.graphs.recorder import Kernel
from tests.support.emulated_cuda import emulate
from tests.support.emulated_metal import guarded


class EmulatedRunner(KernelRunner):
    """Gives kernels copies of arrays, behind which no memory may be touched.

    What they write is in the arrays, too, once they have run.
    """

    def __init__(self) -> None:
        self._known: list[tuple[np.ndarray, np.ndarray]] = []
        """The memory of arrays, and what kernels have in its place."""

    def address(self, array: mx.array) -> int:
        memory = memory_of(array)
        for known, copy in self._known:
            if (known.ctypes.data, known.nbytes) == (memory.ctypes.data, memory.nbytes):
                return int(copy.ctypes.data)
        self._known.append((memory, guarded(memory)))
        return int(self._known[-1][1].ctypes.data)

    def run(self, kernel: Kernel) -> None:
        launch(kernel)
        for memory, copy in self._known:
            memory[...] = copy


def launch(kernel: Kernel, aligned: int = 16) -> None:
    """Mutates: the memory at the addresses that a kernel is given.

    Args:
        aligned: bytes, of arrays.
    """
    assert isinstance(kernel.source, str), "libraries have no source"
    x, y, z = kernel.grid
    _emulated(kernel.source, len(kernel.arguments), kernel.shared, aligned)(
        inputs=[mx.array(np.array(kernel.arguments, np.int64))],
        grid=(x * kernel.block, y, z),
        threadgroup=(kernel.block, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )


@cache
def _emulated(source: str, arguments: int, shared: int, aligned: int) -> MXKernel:
    """Return the kernel of a source, which finds its arguments in an array of addresses."""
    header, _, rest = source.partition('extern "C"')
    signature, _, body = rest.partition("{")
    parameters = re.findall(r"((?:const )?\w+(?: \w+)?\*) (\w+)[,)]", signature)
    assert len(parameters) == arguments
    lines = [f"{t} {name} = ({t})addresses[{n}];" for n, (t, name) in enumerate(parameters)]
    body = "\n".join([*lines, body[: body.rindex("}")]])
    return emulate("step", ["addresses"], ["done"], body, header, shared, aligned)


def memory_of(array: mx.array) -> np.ndarray:
    """Return an array's own memory, computed."""
    mx.eval(array)
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(bits)
    return np.asarray(memoryview(bits))
