"""Responses that continue without their clients, as kept streams under their own ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.api.responses.addition import Addition
from quire.api.responses.render import ResponseSettings
from quire.api.responses.store import ResponseStore, Stored
from quire.api.responses.stored_item import StoredItem
from quire.api.shared.kept_streams import Held, KeptStreams, Resumed
from quire.api.shared.pieces import whole
from quire.api.shared.sse import EventStream
from quire.core.errors import RequestError
from quire.serving.streams import GenerationStream
from quire.text.events import Failed


@dataclass(frozen=True, slots=True)
class BackgroundResponse:
    """One response in the background.

    Attributes:
        said: the conversation that it answers.
        addition: the items to add to the request's conversation, if it has one.
    """

    id: str
    settings: ResponseSettings
    said: Sequence[StoredItem]
    store: ResponseStore
    streams: KeptStreams
    addition: Addition

    def put(self, status: str, *, running: bool = False, **changed: Any) -> None:
        """Store the response in its present state."""
        body = tuple(self.settings.body(status, **changed).pieces())
        self.store.add(self.id, body, self.said, output=(), running=running, background=True)

    def keep(self, body: Sequence[bytes], output: Sequence[StoredItem]) -> None:
        """Store the complete response, unless it was stopped or deleted meanwhile."""
        stopped = self.streams.get(self.id).stopped.is_set()
        if not stopped and self.store.get(self.id) is not None:
            self.store.add(self.id, body, self.said, output=output, background=True)
            self.addition.join(self.store, output)

    def ended(self, run: GenerationStream, *, stopped: bool) -> None:
        """Record how a response without a last event ended."""
        stored = self.store.get(self.id)
        if stored is None or not stored.running:
            return
        if stopped:
            self.put("cancelled")
            return
        end = run.choices[0].end
        failure = end.error if isinstance(end, Failed) else None
        message = "The engine ended the request." if failure is None else failure.message
        code = "server_error" if failure is None else failure.code or "server_error"
        self.put("failed", error={"code": code, "message": message})


class BackgroundAnswer(Response):
    """The answer to a background request. It ends when the response does.

    The request keeps its slot and its model until then. A client that does not stream gets the
    response in its first state.
    """

    def __init__(
        self,
        background: BackgroundResponse,
        run: GenerationStream,
        events: EventStream,
        *,
        streamed: bool,
    ) -> None:
        super().__init__()
        self._background = background
        self._run = run
        self._events = events
        self._streamed = streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        background = self._background
        try:
            stream = background.streams.open(background.id)
        except RequestError:
            self._run.abort()
            raise
        background.put("in_progress", running=True)
        held = Held(
            stream,
            background.streams,
            receive,
            send=send if self._streamed else _to_nobody,
            stream_id=background.id,
            read=True,
        )
        stream.attach()  # it goes on where nobody reads
        try:
            if not self._streamed:
                stored = background.store.get(background.id)
                answer = await whole(() if stored is None else stored.body)
                await answer(scope, receive, send)
            await self._events(scope, held.receive, held.send)
        finally:
            background.ended(self._run, stopped=stream.stopped.is_set())
            stream.detach()
            await held.close()


async def _to_nobody(message: Message) -> None: ...


async def cancelled(stored: Stored, response_id: str, streams: KeptStreams) -> None:
    """Stop a response in the background, and wait until it has ended.

    Raises:
        RequestError: the response does not run in the background.
    """
    if not stored.background:
        raise RequestError(
            "Only a response with 'background': true can be cancelled.",
            param="response_id",
            code="not_in_background",
        )
    if stored.running:
        stream = streams.get(response_id)
        stream.stopped.set()
        while not stream.over:
            await stream.changed(stream.last)


def resumed(request: Request, streams: KeptStreams) -> Resumed:
    """Return the stream of a background response, after event `starting_after`.

    Raises:
        RequestError: `starting_after` is not a number.
        NotFound: there is no such stream.
    """
    given = request.query_params.get("starting_after", "-1")
    if not given.removeprefix("-").isdecimal() or len(given) > 18:
        raise RequestError("'starting_after' must be a whole number.", param="starting_after")
    return Resumed(streams.get(request.path_params["id"]), max(0, int(given) + 1))
