"""The leading process's end of a follower: starts it here or by ssh, sends calls, watches it."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

from quire.core.errors import ModelError
from quire.core.frames import Frames, encode
from quire.core.hosts import LOCAL, Host, Hosts
from quire.device.cards import card_of
from quire.engine.split_disk import Report

log = logging.getLogger("quire.ranks")

_MODULE = "quire.engine.follower"
_PASSED = ("MLX_ENABLE_TF32", "MLX_USE_CUDA_GRAPHS")
"""Variables of this process that processes elsewhere need as well."""
_SSH = (
    *("ssh", "-o", "BatchMode=yes"),
    # A machine that is gone ends the engine in seconds.
    *("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3"),
)


@dataclass(frozen=True, slots=True)
class Ready:
    """Message of a follower that is about to join."""


@dataclass(frozen=True, slots=True)
class Probed:
    """A follower's measurement of its own speed, see `SplitExecutor.probe`."""

    seconds: float


class FollowerProcess:
    """A follower. Messages go by its standard input and output; ssh passes them on. If it ends,
    this process ends.

    Args:
        opening: the first message to it.
        heard: takes its disk tier's reports, in another thread.

    Attributes:
        work_seconds: its last measurement; 0 before the first.
    """

    def __init__(
        self, hosts: Hosts, rank: int, opening: Any, heard: Callable[[Report], None]
    ) -> None:
        self.work_seconds = 0.0
        self._heard = heard
        self._rank, self._name = rank, hosts.hosts[rank].ssh
        self._ready, self._ended = Event(), Event()
        self._pipe, theirs = socket.socketpair()
        environment = _environment(hosts, rank)
        self._process = subprocess.Popen(
            _command(hosts.hosts[rank], environment),
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            process_group=0,
            env=os.environ | environment,
        )
        theirs.close()
        self.send(encode(opening))
        Thread(target=self._listen, daemon=True).start()

    def send(self, frame: bytes) -> None:
        """Send a frame. A follower that has ended takes none; `_listen` ends this process."""
        try:
            self._pipe.sendall(frame)
        except ConnectionError:
            self._ended.wait()

    def await_ready(self) -> None:
        """Wait until it is about to join. Joining itself would wait for all ranks without a
        timeout.

        Raises:
            ModelError: it has ended.
        """
        self._ready.wait()
        if self._ended.is_set():
            raise ModelError(
                f"process {self._rank} of the split model, on {self._name}, ended before it "
                "had started"
            )

    def _listen(self) -> None:
        frames = Frames(self._pipe)
        try:
            while True:
                match frames.next():
                    case Ready():
                        self._ready.set()
                    case Probed(seconds):
                        self.work_seconds = seconds
                    case report:
                        self._heard(report)
        except EOFError:
            self._end()

    def _end(self) -> None:
        """End this process with the follower: the model cannot continue. While it has not started,
        `await_ready` says so.
        """
        code = self._process.wait()
        log.error(
            "process %d of the split model, on %s, ended (exit code %d); the engine stops",
            *(self._rank, self._name, code),
        )
        self._ended.set()
        if self._ready.is_set():
            os._exit(1)
        self._ready.set()


def _environment(hosts: Hosts, rank: int) -> dict[str, str]:
    """Return the environment variables that differ from this process's."""
    named = dict(each.split("=", 1) for each in hosts.envs)
    return card_of(hosts.local_rank(rank)) | named


def _command(host: Host, environment: dict[str, str]) -> list[str]:
    command = [sys.executable, "-m", _MODULE]
    if host.ssh in LOCAL:
        return command
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ} | environment
    variables = [f"{name}={value}" for name, value in passed.items()]
    return [*_SSH, host.ssh, shlex.join(["env", *variables, *command])]
