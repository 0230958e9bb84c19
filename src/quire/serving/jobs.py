"""Work that may take long, much memory, or crash: each piece in a process of its own.

A first process opens what all jobs need, once, and forks a child for each job (`job_process`). So a
job begins in milliseconds, leaves nothing behind, and can be killed at any moment: when its client
leaves, when it takes too long, or too much memory. A fault of native code costs one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.core.errors import EngineFailure, RequestError
from quire.core.frames import Frames, encode
from quire.core.processes import wait_or_kill
from quire.serving.tasks import cancel_and_wait

log = logging.getLogger("quire.jobs")

Result = TypeVar("Result")

Asker = Callable[..., Any]
"""From within a job: the server's answer to a question and its arguments, see `Jobs.run`."""
Opener = Callable[[Asker], object]
"""Makes the first argument of every job, before there is one. Has to be picklable."""

ORDER = struct.Struct("<cQ")
"""To the first process: what to do, and the number of the job."""
START, KILL = b"s", b"k"
TOO_COSTLY = "request_too_costly"
"""The code of what is refused because its job took too much, or crashed."""

_OPENING_S = 120.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Threads do not survive a fork; nor is one request to have all cores."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What jobs may take.

    Attributes:
        at_once: others wait.
        cpu_s: processor seconds of one.
        wall_s: seconds of one, from its start.
        memory: bytes of one, beside what all share. Kept on Linux.
    """

    at_once: int = max(2, min(8, (os.cpu_count() or 2) // 2))
    cpu_s: int = 60
    wall_s: float = 300.0
    memory: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Opening:
    """What the first process begins with."""

    opener: Opener
    limits: JobLimits
    log_level: str
    log_format: str = "text"


@dataclass(frozen=True, slots=True)
class Ask:
    """From a job: it wants to know something that only the server knows."""

    question: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Done:
    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    error: Exception


def too_costly(limits: JobLimits) -> RequestError:
    """The refusal of a request whose job took too much, or crashed."""
    return RequestError(
        f"The request could not be read: doing so took more than {limits.cpu_s} s of processor "
        f"time or {limits.memory >> 20} MiB of memory, or crashed a decoder.",
        code=TOO_COSTLY,
    )


class Jobs:
    """Runs jobs. Belongs to one event loop."""

    def __init__(
        self,
        opener: Opener,
        limits: JobLimits,
        log_level: str = "info",
        log_format: str = "text",
    ) -> None:
        self._opening = Opening(opener, limits, log_level, log_format)
        self._limits = limits
        self._room = asyncio.Semaphore(limits.at_once)
        self._parent: _JobProcess | None = None
        self._starting = asyncio.Lock()
        self._number = 0
        self._opening_soon: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self) -> None:
        """Starts the first process ahead of the first job.

        Raises:
            EngineFailure: it does not start.
        """
        await self._started()

    def open_soon(self) -> None:
        """Starts the first process in the background; the first job waits for it."""
        self._opening_soon = asyncio.create_task(self._open_in_background())

    async def _open_in_background(self) -> None:
        with contextlib.suppress(EngineFailure):  # the first job tries again, and says why
            await self.open()

    async def run(
        self,
        function: Callable[..., Awaitable[Result]],
        *arguments: object,
        answers: Mapping[str, Callable[..., object]] | None = None,
    ) -> Result:
        """Runs `function(opened, *arguments)` in a process of its own; killed when cancelled.

        Args:
            function: of a module's top level.
            answers: to what the job asks its `Asker`, by question.

        Raises:
            RequestError: by the job; or it took too much, or crashed.
            EngineFailure: no job can be started.
        """
        async with self._room:
            parent = await self._started()
            self._number += 1
            number = self._number
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            try:
                with theirs:
                    parent.order(START, number, theirs)
                async with asyncio.timeout(self._limits.wall_s):
                    result: Result = await _talk(ours, (function, arguments), answers)
                    return result
            except (ConnectionError, EOFError, TimeoutError) as error:
                raise too_costly(self._limits) from error
            finally:
                ours.close()
                with contextlib.suppress(OSError):
                    parent.order(KILL, number)

    async def close(self) -> None:
        """Ends all jobs. May be called again."""
        self._closed = True
        if self._opening_soon is not None:
            await cancel_and_wait(self._opening_soon)
        if self._parent is not None:
            await self._parent.close()

    async def _started(self) -> _JobProcess:
        async with self._starting:
            if self._closed:
                raise EngineFailure("the server is shutting down")
            if self._parent is None or not self._parent.alive:
                if self._parent is not None:
                    log.error("the process that starts jobs has ended; starting another")
                    await self._parent.close()
                self._parent = await _JobProcess.start(self._opening)
            return self._parent


class _JobProcess:
    """The first process, whose children do the jobs."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control

    @classmethod
    async def start(cls, opening: Opening) -> _JobProcess:
        ours, theirs = socket.socketpair()
        # Not by -m, under which jobs would import the module a second time.
        code = "from quire.serving.job_process import main; main()"
        command = [sys.executable, "-c", code, str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | _ENVIRONMENT,
                process_group=0,  # out of reach of a terminal's Ctrl-C
            )
        ours.setblocking(False)
        parent = cls(process, ours)
        try:
            async with asyncio.timeout(_OPENING_S):
                await asyncio.get_running_loop().sock_sendall(ours, encode(opening))
                started = await Frames(ours).next_async()
        except (OSError, EOFError) as error:
            await parent.close()
            raise EngineFailure("the process that starts jobs did not start") from error
        except asyncio.CancelledError:
            await parent.close()
            raise
        if isinstance(started, Failed):
            await parent.close()
            raise EngineFailure(f"no process for requests can be started: {started.error}")
        return parent

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def order(self, what: bytes, number: int, pipe: socket.socket | None = None) -> None:
        """Starts the job at the other end of `pipe`, or kills one. An order is 9 bytes long."""
        files = [] if pipe is None else [pipe.fileno()]
        socket.send_fds(self._control, [ORDER.pack(what, number)], files)

    async def close(self) -> None:
        """It kills its children when its end of the pipe closes."""
        self._control.close()
        await asyncio.to_thread(wait_or_kill, self._process, 5)


async def _talk(
    pipe: socket.socket, task: object, answers: Mapping[str, Callable[..., object]] | None
) -> Any:
    """Hands a job its task, answers what it asks, and takes its result."""
    loop = asyncio.get_running_loop()
    frames = Frames(pipe)
    await loop.sock_sendall(pipe, encode(task))
    while True:
        match await frames.next_async():
            case Done(result):
                return result
            case Failed(error):
                raise error
            case Ask(question, arguments):
                answer = (answers or {})[question](*arguments)
                await loop.sock_sendall(pipe, encode(answer))
