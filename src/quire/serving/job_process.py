"""The process that forks a child for each job, and the code that runs in the child; see `jobs`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

from quire.core.errors import QuireError
from quire.core.frames import Frames, encode
from quire.core.logs import write_logs
from quire.core.processes import end_with_parent
from quire.core.stop_signals import leave_stopping_to_the_parent
from quire.serving.job_messages import (
    ENDED,
    NOT_STARTED,
    ORDER,
    START,
    Ask,
    Done,
    Failed,
    JobLimits,
    Opening,
    too_costly,
)

log = logging.getLogger("quire.jobs")

_DATA = b"VmData:"


def main() -> None:
    """Run jobs as a program. Argument 1 is the file descriptor of the pipe."""
    leave_stopping_to_the_parent()
    run_jobs(socket.socket(fileno=int(sys.argv[1])))


def run_jobs(control: socket.socket) -> None:
    """Read the `Opening` from the pipe, then start jobs until it closes."""
    try:
        opening = Frames(control).next()
    except (ConnectionError, EOFError):  # the server ends without a job
        return
    assert isinstance(opening, Opening)
    write_logs(opening.log_level, opening.log_format)
    try:
        asker = _PipeAsker()
        opened = opening.opener(asker)
    except QuireError as error:  # such as a folder that is gone
        with contextlib.suppress(BrokenPipeError):
            control.sendall(encode(Failed(error)))
        return
    gc.collect()
    gc.freeze()  # children share these pages as long as nobody writes to them
    with contextlib.suppress(BrokenPipeError):  # the server has ended meanwhile
        control.sendall(encode(value=True))
    _JobRunner(control, opened, asker, limits=opening.limits).run()


class _PipeAsker:
    """An `Asker` over a pipe. The first process creates it; each child connects its own copy.

    Any thread of a job may ask. One question is on the pipe at a time, followed by its answer.
    """

    def __init__(self) -> None:
        self._pipe: socket.socket | None = None
        self._one_question = threading.Lock()

    def connect(self, pipe: socket.socket) -> None:
        self._pipe = pipe

    def __call__(self, question: str, *arguments: object) -> Any:
        assert self._pipe is not None, "only a job can ask"
        with self._one_question:
            self._pipe.sendall(encode(Ask(question, arguments)))
            return Frames(self._pipe).next()


class _JobRunner:
    def __init__(
        self, control: socket.socket, opened: object, asker: _PipeAsker, limits: JobLimits
    ) -> None:
        self._control = control
        self._opened = opened
        self._asker = asker
        self._limits = limits
        self._children: dict[int, int] = {}
        """Job numbers and process ids. A pid is not used again before it is reaped, here."""

    def run(self) -> None:
        """Fork, signal and reap children until the pipe closes."""
        ended, wake = socket.socketpair()
        for end in (ended, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(ended, select.POLLIN)
        while True:
            ready = {handle for handle, _ in poll.poll()}
            if ended.fileno() in ready:
                ended.recv(4096)
                self._reap()
            if self._control.fileno() in ready and not self._obey():
                break
        for pid in self._children.values():
            os.kill(pid, signal.SIGKILL)

    def _obey(self) -> bool:
        """Carry out one order. Return False when the pipe has closed."""
        order, files, _, _ = socket.recv_fds(self._control, ORDER.size, 1)
        if not order:
            return False
        what, number = ORDER.unpack(order)
        if what == START:
            self._fork(number, files)
        elif number in self._children:
            os.kill(self._children[number], what)
        return True

    def _fork(self, number: int, files: list[int]) -> None:
        """Fork a child for the pipe that came with the order."""
        if not files:  # the system has no descriptor left
            self._tell_end(number, NOT_STARTED)
            return
        with socket.socket(fileno=files[0]) as pipe:
            own = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                log.error("the process for a request cannot be started: %s", error.strerror)
                self._tell_end(number, NOT_STARTED)
                return
            if pid == 0:
                self._control.close()
                end_with_parent(own)
                self._asker.connect(pipe)
                _run(pipe, self._opened, self._limits)
            self._children[number] = pid

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0] != 0:
                pid, status = found
                number = next(n for n, p in self._children.items() if p == pid)
                del self._children[number]
                self._tell_end(number, os.waitstatus_to_exitcode(status))

    def _tell_end(self, number: int, code: int) -> None:
        with contextlib.suppress(ConnectionError):  # the server has ended
            self._control.sendall(ENDED.pack(number, code))


def _run(pipe: socket.socket, opened: object, limits: JobLimits) -> NoReturn:
    """Run a child from start to exit."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        _bound(limits)
        pipe.sendall(encode(_outcome(pipe, opened, limits)))
    except (OSError, EOFError):
        pass  # nobody waits any more
    finally:
        os._exit(0)


def _outcome(pipe: socket.socket, opened: object, limits: JobLimits) -> Done | Failed:
    try:
        function, arguments = Frames(pipe).next()
        return Done(asyncio.run(function(opened, *arguments)))
    except QuireError as error:
        return Failed(error)
    except MemoryError:
        return Failed(too_costly(limits))
    except (ConnectionError, EOFError):
        raise
    except Exception as error:  # a bug must not end the process, which serves others
        log.exception("reading a request failed")
        return Failed(RuntimeError(type(error).__name__))


def _bound(limits: JobLimits) -> None:
    """Set the limits of this process, which the kernel enforces."""
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # only Linux says what is there, and minds
        with open("/proc/self/status", "rb") as status:  # noqa: PTH123
            (line,) = [line for line in status if line.startswith(_DATA)]
        most = (int(line.split()[1]) << 10) + limits.memory
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
