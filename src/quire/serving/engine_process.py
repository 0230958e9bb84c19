"""Starts the processes of engines. Imports little, so that an engine may start before the rest."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from dataclasses import dataclass

from quire.core.config import EngineConfig
from quire.core.frames import encode
from quire.core.messages import Open

WORKER = "quire.engine.worker"
"""The module that the engine's process runs."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A process that opens a model, and this side's end of the socket pair to it."""

    process: subprocess.Popen[bytes]
    pipe: socket.socket

    def end(self) -> None:
        """End the process at once; do nothing if it has ended."""
        self.pipe.close()
        self.process.kill()
        self.process.wait()


def start_engine(
    config: EngineConfig, log_level: str = "info", log_format: str = "text", worker: str = WORKER
) -> EngineProcess:
    """Start a process and tell it which model to open.

    Args:
        worker: the module that the process runs. A module that registers families of its own must
            end by calling `quire.engine.worker.main`.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", worker, str(theirs.fileno())]
    with contextlib.ExitStack() as unless_started, theirs:
        unless_started.callback(ours.close)
        # In a group of its own, which a terminal's Ctrl-C does not reach: this process decides.
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0
        )
        unless_started.pop_all()
    with contextlib.suppress(BrokenPipeError):  # it has ended; its client says so
        ours.sendall(encode(Open(config, log_level, log_format)))
    return EngineProcess(process, ours)
