"""Runs work that may be slow, large or crash in processes of its own.

A first process opens what all jobs need, once, and forks a child for each job (`job_process`). So a
job starts in milliseconds, leaves nothing behind, and can be killed at any moment: when its client
leaves, or when it exceeds its time or memory. A crash of native code costs one request.

A job keeps its place until its child is reaped, so there are never more children than places.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from quire.core.errors import EngineFailure
from quire.core.frames import Frames, encode
from quire.serving.job_messages import (
    NOT_STARTED,
    Ask,
    Done,
    Failed,
    JobLimits,
    Opener,
    Opening,
    too_costly,
)
from quire.serving.job_parent import Job, JobParent
from quire.serving.job_starts import JobProcess
from quire.serving.places import Place, Places
from quire.serving.tasks import cancel_and_wait, to_the_end

log = logging.getLogger("quire.jobs")

Result = TypeVar("Result")

_CLOSED = "the server is shutting down"
_REAPED_S = 5.0
"""Seconds after which a child that has closed its pipe counts as crashed, reaped or not."""


class Jobs:
    """Runs jobs. Belongs to one event loop, and owns all processes that it starts.

    Args:
        process: the first process, if it was started already; this owns it.
    """

    def __init__(
        self,
        opener: Opener,
        limits: JobLimits,
        log_level: str = "info",
        *,
        log_format: str = "text",
        process: JobProcess | None = None,
    ) -> None:
        self._opening = Opening(opener, limits, log_level, log_format=log_format)
        self._limits = limits
        self.places = Places(limits.at_once)
        self._process = process
        self._parent: JobParent | None = None
        self._starting: asyncio.Task[JobParent] | None = None
        self._closed = False

    async def open(self) -> None:
        """Start the first process before the first job.

        Raises:
            EngineFailure: it does not start.
        """
        await self._started()

    def open_soon(self) -> None:
        """Start the first process in the background; the first job waits for it."""
        self._start()

    async def run(
        self,
        function: Callable[..., Awaitable[Result]],
        *arguments: object,
        key: str = "",
        answers: Mapping[str, Callable[..., object]] | None = None,
    ) -> Result:
        """Run `function(opened, *arguments)` in a process, which is killed on cancellation.

        Args:
            function: a function at a module's top level.
            key: the API key of the request; keys take turns.
            answers: functions that answer the job's questions to its `Asker`, by question.

        Raises:
            RequestError: raised by the job; or it exceeded a limit or crashed, or too many jobs
                wait.
            EngineFailure: no job can be started, or the server ends.
        """
        place = await self.places.acquire(key)
        try:
            job = (await self._started()).job()
        except BaseException:
            self.places.release(place)
            raise
        job.ended.add_done_callback(lambda _: self.places.release(place))
        try:
            result: Result = await self._result(job, place, (function, arguments), answers=answers)
            return result
        finally:
            job.end()

    async def close(self) -> None:
        """End all jobs. May be called again."""
        self._closed = True
        self.places.close(_CLOSED)
        if self._starting is not None:
            await cancel_and_wait(self._starting)
        if self._parent is not None:
            await to_the_end(self._parent.close())

    async def _result(
        self,
        job: Job,
        place: Place,
        task: object,
        answers: Mapping[str, Callable[..., object]] | None,
    ) -> Any:
        """Wait for a job's result, within its limits."""
        try:
            async with asyncio.timeout(self._limits.wall_s) as limit:
                self.places.attach(place, *_pausing(job, limit))
                return await _talk(job.pipe, task, answers)
        except TimeoutError as error:
            raise too_costly(self._limits) from error
        except (ConnectionError, EOFError) as error:
            raise await self._why_ended(job) from error

    async def _why_ended(self, job: Job) -> Exception:
        """Return the error for a job whose child ended without a result."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAPED_S):
                code = await asyncio.shield(job.ended)
            if self._closed:
                return EngineFailure(_CLOSED)
            if code is None:
                return EngineFailure("the process that reads requests has ended; try again")
            if code == NOT_STARTED:
                return EngineFailure(
                    "the system has reached its limit of processes; try again later"
                )
        return too_costly(self._limits)

    async def _started(self) -> JobParent:
        while True:
            if self._closed:
                raise EngineFailure(_CLOSED)
            if self._parent is not None and self._parent.alive:
                return self._parent
            starting = self._start()
            try:
                await asyncio.shield(starting)
            except asyncio.CancelledError:
                if starting.cancelled():  # by `close`
                    raise EngineFailure(_CLOSED) from None
                raise

    def _start(self) -> asyncio.Task[JobParent]:
        """Return the start of the first process, shared by all that wait for it.

        Cancelling one of them does not stop it.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start_parent())
            self._starting.add_done_callback(self._on_started)
        return self._starting

    def _on_started(self, task: asyncio.Task[JobParent]) -> None:
        self._starting = None
        if not task.cancelled():
            task.exception()  # the next job tries again, and says why

    async def _start_parent(self) -> JobParent:
        if self._parent is not None:
            log.error("the process that starts jobs has ended; it is restarted")
            await self._parent.close()
        started, self._process = self._process, None
        self._parent = await JobParent.start(self._opening, started)
        return self._parent


def _pausing(job: Job, limit: asyncio.Timeout) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return how a job is paused and resumed. Its time limit stands still meanwhile."""
    loop = asyncio.get_running_loop()
    left = 0.0

    def pause() -> None:
        nonlocal left
        if (when := limit.when()) is not None:
            left = when - loop.time()
            with contextlib.suppress(RuntimeError):  # the job is over
                limit.reschedule(None)
        job.pause()

    def resume() -> None:
        with contextlib.suppress(RuntimeError):
            limit.reschedule(loop.time() + left)
        job.resume()

    return pause, resume


async def _talk(
    pipe: Any, task: object, answers: Mapping[str, Callable[..., object]] | None
) -> Any:
    """Send a job its task, answer its questions, and return its result."""
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
