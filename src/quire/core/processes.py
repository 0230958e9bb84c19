"""Resource limits and termination of processes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Protocol

_DESCRIPTORS = (1 << 16, 10240)
"""Limits on open files to try, highest first. macOS allows 10,240 whatever it reports."""
_LOOK_S = 0.01
"""Seconds between two looks at whether a forked process has ended."""
_SPARE_DESCRIPTORS = 32
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


def surplus_descriptors(descriptor: int) -> int:
    """Return how many files to close, given the descriptor of a new one, the lowest free number.

    The last descriptors below the limit on open files are for processes and temporary files.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 0
    return max(0, descriptor + 1 + min(_SPARE_DESCRIPTORS, limit // 4) - limit)


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


class ChildProcess(Protocol):
    """A child process that its owner polls, waits for and kills, as `subprocess.Popen` does."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class ForkedProcess:
    """A child that was forked and runs no program of its own. Any thread may use it.

    Attributes:
        pid: its process id, which no other process gets before `poll` or `wait` saw its end.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, or the negative of a signal's number; None while it runs."""
        with self._reaping:
            if self._status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid != 0:
                    self._status = os.waitstatus_to_exitcode(status)
            return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; see `poll`.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        ends = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() >= ends:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            time.sleep(_LOOK_S)
        return status

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def close_descriptors_but(kept: int) -> None:
    """Close what a forked process inherited, as programs' starts do: all but `kept` and the output.

    Its standard input is empty from then on.
    """
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    for each in os.listdir("/dev/fd"):  # noqa: PTH208
        if int(each) > 2 and int(each) != kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(each))


def wait_or_kill(process: ChildProcess, seconds: float) -> None:
    """Wait until a process that was asked to end has ended; kill it after some seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
