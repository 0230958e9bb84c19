"""Answers that are not streamed: the same events as a stream's, folded."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from starlette.requests import Request

from quire.api.access import note
from quire.api.errors import RunFailed
from quire.api.sse import abort_when_gone
from quire.engine.runs import Run
from quire.text.events import Failed
from quire.text.output import Answer, Fold


async def collect(request: Request, run: Run) -> list[Answer]:
    """The answers of a run, by choice; the run is aborted as soon as the client goes away.

    Raises:
        RunFailed: a choice failed; the others are aborted.
    """
    watcher = asyncio.create_task(abort_when_gone(request.receive, run))
    folds = [Fold() for _ in run.choices]
    try:
        async with aclosing(run.batches()) as batches:
            async for batch in batches:
                for index, event in batch:
                    if isinstance(event, Failed):
                        raise RunFailed(event.error)
                    folds[index].add(event)
    finally:
        watcher.cancel()
        note(request.scope, run.summary())
    return [each.answer() for each in folds]
