"""The handle of a deployment whose replicas do as they are told; knows no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from quire.core.info import EngineStats
from quire.core.request import FinishReason, Output, Request
from quire.scale.routing import Route

Script = Callable[[Sequence[Request]], AsyncIterator[str | list[Output]]]
"""The answers of a replica to the requests of one call."""


class Died(Exception):
    """Stands for Ray's error of an actor that died."""


class Stream:
    """A call's answer."""

    def __init__(self, messages: AsyncIterator[str | list[Output]]) -> None:
        self._messages = messages
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[str | list[Output]]:
        return self._messages

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """A deployment's handle.

    Attributes:
        routes: of the calls that came, in order.
        asked: the ids of their requests.
        streams: their answers.
        aborted: what was told to end, by whom.
        knows: whether the replica that is told has the request.
    """

    def __init__(self, *scripts: Script, stats: Sequence[object] = ()) -> None:
        self._scripts = list(scripts)
        self._stats = stats
        self.routes: list[Route] = []
        self.asked: list[list[str]] = []
        self.streams: list[Stream] = []
        self.aborted: list[tuple[str, str, FinishReason]] = []
        self.abort = _Method(self._abort)
        self.knows = True

    def options(self, *, method_name: str, stream: bool) -> _Method:
        assert (method_name, stream) == ("generate", True)
        return _Method(self._generate)

    def broadcast(self, name: str) -> Any:
        assert name == "stats"
        return _Answers(self._stats)

    def _generate(self, route: Route, requests: Sequence[Request]) -> Stream:
        self.routes.append(route)
        self.asked.append([each.id for each in requests])
        self.streams.append(Stream(self._scripts.pop(0)(requests)))
        return self.streams[-1]

    async def _abort(self, route: Route, request_id: str, reason: FinishReason) -> bool:
        self.aborted.append((route.replica, request_id, reason))
        return self.knows


class _Method:
    def __init__(self, called: Callable[..., Any]) -> None:
        self.remote = called


class _Answers:
    def __init__(self, found: Sequence[object]) -> None:
        self._found = found

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[object]:
        return list(self._found)


def says(name: str, *steps: list[Output]) -> Script:
    """Return a replica that says this and ends."""

    async def script(requests: Sequence[Request]) -> AsyncIterator[str | list[Output]]:
        yield name
        for step in steps:
            yield step

    return script


def dies(name: str, *steps: list[Output]) -> Script:
    """Return a replica that says this and dies."""

    async def script(requests: Sequence[Request]) -> AsyncIterator[str | list[Output]]:
        if name:
            yield name
        for step in steps:
            yield step
        raise Died

    return script


def hangs(name: str = "") -> Script:
    """Return a replica that never answers; without a name it does not even take the call."""

    async def script(requests: Sequence[Request]) -> AsyncIterator[str | list[Output]]:
        if name:
            yield name
        await asyncio.Event().wait()

    return script


def after(event: asyncio.Event, script: Script) -> Script:
    """Return a replica that takes the call when the event is set."""

    async def waiting(requests: Sequence[Request]) -> AsyncIterator[str | list[Output]]:
        await event.wait()
        async for message in script(requests):
            yield message

    return waiting


HEALTHY = EngineStats(running=1, waiting=2, kv_used=(("a", 3),), finished=(("stop", 1),))
