"""Compiles kernels of MLX side by side, in processes: `python -m quire.device.cuda.modules DTYPE
NAME...` compiles those of some names.

MLX 0.32.4 compiles what gathers and what scatters for each choice of types when it is first needed.
It takes 2 to 4 seconds for each, one after the other, but finds on disk what another process has
compiled.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import mlx.core as mx

from quire.core.processes import wait_or_kill
from quire.device.private import CACHE, kernel_folder
from quire.device.verified import Check, Verification, verified_kernels

log = logging.getLogger("quire.device")

_PROCESS_BYTES = 1 << 30
"""Most memory of the GPU that a process takes."""
_LONGEST_S = 60.0
_LOOKED_FOR = ".ptx"
"""Suffix of the file by which MLX finds a kernel, so the last one to appear."""
_NAMES = {mx.bfloat16: "bfloat16", mx.float16: "float16", mx.float32: "float32"}


def _gathered(array: mx.array) -> mx.array:
    return array[mx.array([0])]


def _assigned(array: mx.array) -> mx.array:
    array[mx.array([0])] = array[:1]
    return array


def _assigned_by_two(array: mx.array) -> mx.array:
    array[mx.array([0]), mx.array([0])] = array[0, :1]
    return array


def _added(array: mx.array) -> mx.array:
    return array.at[mx.array([0]), mx.array([0])].add(array[0, :1])


Operation = tuple[Callable[[mx.array], mx.array], mx.Dtype | None]
"""A function of a matrix that needs a kernel, and the matrix's type; None for the model's."""

OPERATIONS: Mapping[str, Operation] = {
    "blocks written": (_assigned_by_two, None),
    "logits adjusted": (_added, mx.float32),
    "blocks copied": (_assigned, None),
    "states written": (_assigned, mx.float32),
    "tokens placed": (_assigned, mx.int32),
    "rows chosen": (_gathered, None),
    "float32 chosen": (_gathered, mx.float32),
    "codes chosen": (_gathered, mx.uint32),
    "tokens chosen": (_gathered, mx.int32),
}
"""Operations of every start, the longest to compile first."""


class ModuleProcesses:
    """Processes that compile the kernels of `OPERATIONS` while a model is read.

    A context that starts none by itself. When it is left, all that were started have ended.
    """

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._verification = Verification(Check.COMPILED)

    def start(self, dtype: mx.Dtype, memory: int) -> None:
        """Start the processes, unless the kernels are compiled or would be lost.

        Args:
            dtype: of the model's activations.
            memory: bytes of the GPU that they may take.
        """
        self._verification = Verification(Check.COMPILED, ("MLX", *OPERATIONS, dtype))
        most = min(len(OPERATIONS), os.cpu_count() or 1, memory // _PROCESS_BYTES)
        if kernel_folder() is None or dtype not in _NAMES or most < 2:
            return
        if self._processes or verified_kernels().holds(self._verification):
            return
        names = list(OPERATIONS)
        for first in range(most):
            command = [sys.executable, "-m", __name__, _NAMES[dtype], *names[first::most]]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            self._processes.append(process)

    def __enter__(self) -> ModuleProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        started, failed = time.monotonic(), False
        for process in self._processes:
            left = 0.0 if kind else started + _LONGEST_S - time.monotonic()
            said = _said(process, left)
            if process.returncode:
                failed = True
                log.debug("kernels of MLX are compiled later: %s", said)
        if self._processes and not failed and kind is None:
            verified_kernels().add(self._verification)


def _said(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Wait until a process has ended; kill it after some seconds. Return its last error line."""
    try:
        _, errors = process.communicate(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        wait_or_kill(process, 0)
        return "it took too long"
    return errors.decode(errors="replace").strip().rpartition("\n")[2]


def main(dtype: str, *names: str) -> None:
    """Run operations, so that MLX compiles their kernels. They appear in MLX's folder when they are
    whole: what MLX writes there itself stays half written if the process is killed.
    """
    folder = os.environ[CACHE]
    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own_folder:
        os.environ[CACHE] = own_folder
        for name in names:
            run, own = OPERATIONS[name]
            mx.eval(run(mx.zeros((2, 2), own or getattr(mx, dtype))))
        for path in sorted(Path(own_folder).iterdir(), key=lambda path: path.suffix == _LOOKED_FOR):
            path.replace(Path(folder, path.name))


if __name__ == "__main__":
    main(*sys.argv[1:])
