"""Structured cancellation: tasks do not outlive their owner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Tasks:
    """Running tasks whose results nobody reads. Their owner ends them."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task, and keep it until it has ended."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def wait(self) -> None:
        """Return when all tasks have ended."""
        if self._running:
            await asyncio.wait(self._running)

    async def cancel(self) -> None:
        """Cancel all tasks and return when they have ended."""
        await cancel_and_wait(*self._running)


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and return when they have ended, so that nothing of them keeps running.

    Their exceptions are not raised here.
    """
    running = [task for task in tasks if task.cancel()]
    if running:
        await asyncio.wait(running)


async def to_the_end(work: Awaitable[Result]) -> Result:
    """Return the result of `work`, which runs to its end even if the caller is cancelled.

    For closing resources: it completes even if whoever asked for it leaves. The cancellation is
    raised after the work.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # nobody is there to hear it
        raise cancelled
    return task.result()


async def close_all(*closing: Coroutine[Any, Any, None]) -> None:
    """Close several things at once, each to its end. Then raise the first error."""

    async def each_to_its_end() -> None:
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    await to_the_end(each_to_its_end())


def first_error(error: BaseException) -> BaseException:
    """Return the first single error of an exception group, as task groups raise them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
