"""Answers that are not streamed: folds of the events that a stream would send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from starlette.requests import Request

from quire.api.shared.access import note_run
from quire.api.shared.limits import Slots
from quire.api.shared.render import Logprobs
from quire.api.shared.sse import abort_when_gone
from quire.serving.run_failed import RunFailed
from quire.serving.streams import GenerationStream
from quire.serving.tasks import cancel_and_wait
from quire.text.events import Event, Failed, Reasoning, Text
from quire.text.output import Answer, Fold


async def collect(
    request: Request, run: GenerationStream, logprobs: Sequence[Logprobs], slots: Slots
) -> list[Answer]:
    """Return the answers of a run, one for each choice; see `consume`.

    Args:
        logprobs: each choice's writer of log-probabilities, which are not part of the answers.
        slots: counts the bytes that are held.

    Raises:
        Overloaded: log-probabilities exceed the memory for them.
    """
    folds = [Fold() for _ in run.choices]

    def take(index: int, event: Event) -> None:
        if isinstance(event, Text | Reasoning) and event.logprobs:
            reasoning = isinstance(event, Reasoning)
            written = logprobs[index].add(event.logprobs, reasoning=reasoning)
            slots.hold(request.scope, written)
            event = type(event)(event.text)
        folds[index].add(event)

    await consume(request, run, take)
    return [each.answer() for each in folds]


async def consume(
    request: Request, run: GenerationStream, take: Callable[[int, Event], None]
) -> None:
    """Pass every event of a run to `take`, with the number of its choice.

    The run is aborted as soon as the client leaves.

    Raises:
        RunFailed: a choice failed; the others are aborted.
    """
    watcher = asyncio.create_task(abort_when_gone(request.receive, run))
    try:
        async with aclosing(run.batches()) as batches:
            async for batch in batches:
                for index, event in batch:
                    if isinstance(event, Failed):
                        raise RunFailed(event.error)
                    take(index, event)
    finally:
        note_run(request.scope, run)
        await cancel_and_wait(watcher)
