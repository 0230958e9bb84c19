"""What processes may hold, and how they end."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from typing import Any

_DESCRIPTORS = (1 << 16, 10240)
"""What is asked for, the most first; macOS gives 10,240, whatever it says its limit is."""


def allow_many_descriptors() -> None:
    """Raises this process's limit on open files as far as the system lets it.

    It begins at 1,024 on Linux and 256 on macOS, for the sake of programs that use `select`. A
    server that has reached it accepts connections and closes them without an answer.
    """
    for wanted in _DESCRIPTORS:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def wait_or_kill(process: subprocess.Popen[Any], seconds: float) -> None:
    """Waits until a process that was asked to end has ended; kills it after so many seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
