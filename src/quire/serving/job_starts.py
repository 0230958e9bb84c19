"""Starts the first process of jobs: as a fork of the server, or as a program of its own."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import NoReturn

from quire.core.processes import ChildProcess, ForkedProcess, close_descriptors_but
from quire.core.stop_signals import leave_stopping_to_the_parent
from quire.serving.job_process import run_jobs

log = logging.getLogger("quire.jobs")

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment that keeps libraries single-threaded: threads do not survive a fork, and one request
must not take all cores.
"""


@dataclass(frozen=True, slots=True)
class JobProcess:
    """A process that waits for its `Opening`, and this side's end of the pipe to it."""

    process: ChildProcess
    control: socket.socket

    def end(self) -> None:
        """End the process at once; do nothing if it has ended."""
        self.control.close()
        self.process.kill()
        self.process.wait()


def fork_job_process() -> JobProcess:
    """Fork the process off this one, whose imports it then shares. They take a program 2 s.

    This process must have one thread only: others do not survive a fork, and may hold locks.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        pid = os.fork()
        if pid == 0:
            _become_job_process(theirs)
    return JobProcess(ForkedProcess(pid), ours)


def start_job_process() -> JobProcess:
    """Start the process as a program, whatever runs in this one."""
    ours, theirs = socket.socketpair()
    # Not by -m, under which jobs would import the module a second time.
    code = "from quire.serving.job_process import main; main()"
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    with contextlib.ExitStack() as unless_started, theirs:
        unless_started.callback(ours.close)
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | _ENVIRONMENT,
            process_group=0,  # out of reach of a terminal's Ctrl-C
        )
        unless_started.pop_all()
    return JobProcess(process, ours)


def _become_job_process(control: socket.socket) -> NoReturn:
    """Do in a fork of the server what a program's start does, and run jobs until the end.

    The server's objects stay referenced by the stack, so none of them closes a descriptor anew.
    """
    try:
        leave_stopping_to_the_parent()
        os.setpgid(0, 0)
        close_descriptors_but(control.fileno())
        os.environ.update(_ENVIRONMENT)  # read by libraries that are not loaded yet
        gc.freeze()  # the server's objects stay shared, since no collection writes to them
        run_jobs(control)
    except Exception:  # whatever it is, this fork must not run on in the server's code
        log.exception("the process that starts jobs has failed")
    finally:
        os._exit(0)
