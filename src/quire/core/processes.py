"""Resource limits and termination of processes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
from typing import Any

_DESCRIPTORS = (1 << 16, 10240)
"""Limits on open files to try, highest first. macOS allows 10,240 whatever it reports."""
_YOUNG_OBJECTS = 10_000
"""Objects allocated, less those freed, after which the garbage collector looks at them. Python's
default of 700 took 7% of a loaded server's time; to look at so many takes 0.2 ms.
"""


def allow_many_descriptors() -> None:
    """Raise this process's limit on open files as far as the system allows.

    It starts at 1,024 on Linux and 256 on macOS, for programs that use `select`. A server at its
    limit accepts connections and closes them without an answer.
    """
    for wanted in _DESCRIPTORS:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def freeze_heap() -> None:
    """Exempt what is in memory now from garbage collection, and collect what follows less often.

    Called once a process is ready to serve: collections hold up its streams.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies. Linux only; elsewhere nothing happens.

    Args:
        parent: the parent's process id, read before the fork, since the parent may have died
            meanwhile.
    """
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_or_kill(process: subprocess.Popen[Any], seconds: float) -> None:
    """Wait until a process that was asked to end has ended; kill it after some seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
