"""Answers that are not streamed: the same events as a stream's, folded."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request

from quire.api.access import note
from quire.api.errors import RunFailed
from quire.api.sse import abort_when_gone
from quire.engine.runs import Run
from quire.text.events import (
    Event,
    Failed,
    Finished,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallBegun,
)


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Answer:
    text: str
    reasoning: str
    tool_calls: list[Call]
    end: Finished


def fold(events: list[Event]) -> Answer:
    text, reasoning, calls = "", "", []
    for event in events:
        match event:
            case Text():
                text += event.text
            case Reasoning():
                reasoning += event.text
            case ToolCallBegun():
                calls.append(Call(event.id, event.name, ""))
            case ToolCallArguments():
                calls[event.index].arguments += event.json
    end = events[-1]
    assert isinstance(end, Finished)
    return Answer(text, reasoning, calls, end)


async def collect(request: Request, run: Run) -> list[list[Event]]:
    """All events of a run, by choice; the run is aborted as soon as the client goes away.

    Raises:
        RunFailed: a choice failed; the others are aborted.
    """
    watcher = asyncio.create_task(abort_when_gone(request.receive, run))
    events: list[list[Event]] = [[] for _ in run.choices]
    try:
        async with aclosing(run.batches()) as batches:
            async for batch in batches:
                for index, event in batch:
                    if isinstance(event, Failed):
                        raise RunFailed(event.error)
                    events[index].append(event)
    finally:
        watcher.cancel()
        note(request.scope, run.summary())
    return events
