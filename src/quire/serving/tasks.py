"""Structured cancellation: tasks do not outlive their owner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and returns when they have ended.

    Nothing of them runs on, or holds anything, behind their owner's back. What they raise is not
    raised here.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def to_the_end(work: Awaitable[Result]) -> Result:
    """Return the result of `work`, which runs to its end even if the caller is cancelled.

    What closes something runs so: whoever asked for it may leave, and it closes all the same. The
    cancellation is raised when the work is over.
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
    """Close several things at once, each to its end. Raise the first error when all are closed."""

    async def each_to_its_end() -> None:
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    await to_the_end(each_to_its_end())
