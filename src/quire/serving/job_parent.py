"""The first process of `jobs` as the event loop sees it: it starts, pauses and kills children."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections import deque
from dataclasses import dataclass

from quire.core.errors import EngineFailure
from quire.core.frames import Frames, encode
from quire.core.processes import wait_or_kill
from quire.serving.job_messages import ENDED, ORDER, START, Failed, Opening
from quire.serving.job_starts import JobProcess, start_job_process
from quire.serving.tasks import to_the_end

_OPENING_S = 120.0


class Job:
    """A child process, or one that is still to be started.

    Its owner must call `end` when it no longer waits for the result.

    Attributes:
        number: identifies the child among all of its parent.
        pipe: the server's end of the child's pipe; non-blocking.
        ended: future that is done once the child is reaped, or never can be. Its result is the exit
            code, the negative of a signal's number, or None if the first process is gone.
    """

    def __init__(self, parent: JobParent, number: int, pipe: socket.socket) -> None:
        self.number = number
        self.pipe = pipe
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._parent = parent

    def pause(self) -> None:
        """Stop the child until `resume`."""
        self._parent.signal(self, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a paused child."""
        self._parent.signal(self, signal.SIGCONT)

    def end(self) -> None:
        """Kill the child if it still lives."""
        self.pipe.close()
        self._parent.signal(self, signal.SIGKILL)


@dataclass(slots=True)
class _Order:
    """A message for the first process. The child's end of the pipe goes with a START."""

    job: Job
    what: int
    pipe: socket.socket | None = None


class JobParent:
    """Owns the first process and its children. Created by `start`; belongs to one event loop.

    Orders are queued here while the pipe to the process is full, so none is lost.
    """

    def __init__(self, started: JobProcess) -> None:
        self._process = started.process
        self._control = started.control
        self._loop = asyncio.get_running_loop()
        self._orders: deque[_Order] = deque()
        self._jobs: dict[int, Job] = {}
        self._received = bytearray()
        self._number = 0
        self._gone = False

    @classmethod
    async def start(cls, opening: Opening, started: JobProcess | None = None) -> JobParent:
        """Start the process and wait until it can start jobs.

        Args:
            started: a process that waits for its opening; None starts one.

        Raises:
            EngineFailure: it does not start.
        """
        parent = cls(started or start_job_process())
        control = parent._control
        control.setblocking(False)
        try:
            async with asyncio.timeout(_OPENING_S):
                await parent._loop.sock_sendall(control, encode(opening))
                outcome = await Frames(control).next_async()
        except (OSError, EOFError) as error:
            await parent.close()
            raise EngineFailure("the process that starts jobs could not be started") from error
        except asyncio.CancelledError:
            await to_the_end(parent.close())
            raise
        if isinstance(outcome, Failed):
            await parent.close()
            raise EngineFailure(
                f"the process that reads requests cannot be started: {outcome.error}"
            )
        parent._loop.add_reader(control, parent._read)
        return parent

    @property
    def alive(self) -> bool:
        """Whether jobs can be started."""
        return not self._gone and self._process.poll() is None

    def job(self) -> Job:
        """Start a child. The caller ends it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._number += 1
        job = Job(self, self._number, ours)
        self._jobs[job.number] = job
        self._give(_Order(job, START, theirs))
        return job

    def signal(self, job: Job, number: signal.Signals) -> None:
        """Send a signal to a living child. A child that was not started yet will never start."""
        if job.ended.done():
            return
        unsent = next((each for each in self._orders if each.job is job and each.pipe), None)
        if unsent is None:
            self._give(_Order(job, number))
        elif number == signal.SIGKILL:
            assert unsent.pipe is not None
            unsent.pipe.close()
            self._orders = deque(each for each in self._orders if each.job is not job)
            self._end(job.number, code=None)
        else:
            self._orders.append(_Order(job, number))

    async def close(self) -> None:
        """End the process, which kills its children when its end of the pipe closes."""
        self._lose()
        await asyncio.to_thread(wait_or_kill, self._process, 5)

    def _lose(self) -> None:
        """Handle the end of the process: fail its jobs."""
        if self._gone:
            return
        self._gone = True
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._control.close()
        for order in self._orders:
            if order.pipe is not None:
                order.pipe.close()
        self._orders.clear()
        for number in list(self._jobs):
            self._end(number, code=None)

    def _end(self, number: int, code: int | None) -> None:
        job = self._jobs.pop(number, None)
        if job is not None:
            job.ended.set_result(code)

    # -- the pipe ------------------------------------------------------------------------------

    def _give(self, order: _Order) -> None:
        if self._gone:
            if order.pipe is not None:
                order.pipe.close()
            self._end(order.job.number, code=None)
            return
        self._orders.append(order)
        if len(self._orders) == 1:
            self._write()

    def _write(self) -> None:
        while self._orders:
            order = self._orders[0]
            files = [] if order.pipe is None else [order.pipe.fileno()]
            try:
                # The kernel takes a message of this size whole, or none of it.
                socket.send_fds(self._control, [ORDER.pack(order.what, order.job.number)], files)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._control, self._write)
                return
            except OSError:
                self._lose()
                return
            self._orders.popleft()
            if order.pipe is not None:
                order.pipe.close()
        self._loop.remove_writer(self._control)

    def _read(self) -> None:
        try:
            data = self._control.recv(4096)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        self._received += data
        whole = len(self._received) - len(self._received) % ENDED.size
        for number, code in ENDED.iter_unpack(bytes(self._received[:whole])):
            self._end(number, code)
        del self._received[:whole]
