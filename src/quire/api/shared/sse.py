"""Server-sent events: each batch of a run's events is one write, until the reader leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.api.shared.access import note_run
from quire.api.shared.errors import error_response
from quire.api.shared.pieces import WRITE
from quire.serving.streams import ChoiceEvent, GenerationStream
from quire.serving.tasks import cancel_and_wait
from quire.text.events import Failed, Finished

KEEPALIVE_S = 15.0
"""Seconds of silence after which a keepalive is sent, so that a long prefill or a held-back tool
call does not look like a dead stream.
"""

HEAD_S = 1.0
"""Most seconds that the head of an accepted stream waits for the prefix cache's figures."""

ALONE_S = 0.1
"""Seconds from which on a head may go out without a token. Sooner, it waits for one: together they
are one write.
"""

COMMENT = b": waiting\n\n"


class Renderer(Protocol):
    """Renders events as chunks of one protocol."""

    def render(self, batch: list[ChoiceEvent]) -> Iterable[bytes]:
        """Yield the chunks of a batch, in pieces made as they are sent."""
        ...

    def end(self) -> bytes:
        """Return the bytes that follow the last batch."""
        ...


_MAX_TOLD = 1024
"""Most characters of a header whose length grows with the request."""


def run_headers(run: GenerationStream) -> dict[str, str]:
    """Return headers: how much of the prompt came from the prefix cache, why no more, and schema
    parts not enforced.
    """
    headers = {}
    if (reuse := run.reuse) is not None:
        reuse = reuse.encode("ascii", "replace").decode()
        headers = {"x-quire-cached-tokens": str(run.cached_tokens), "x-quire-cache-reuse": reuse}
    if run.unenforced:
        told = json.dumps("; ".join(run.unenforced))[1:-1]  # ASCII, whatever properties are called
        headers["x-quire-unenforced"] = told[:_MAX_TOLD]
    return headers


async def abort_when_gone(receive: Receive, run: GenerationStream) -> None:
    """Wait until the client leaves, then abort the run."""
    while (await receive())["type"] != "http.disconnect":
        pass
    run.abort()


class EventStream(Response):
    """A streamed answer.

    The status line waits until the engine has accepted the request, so that a refused one gets its
    own status. Then it waits at most `HEAD_S` until the headers can say how much came from the
    prefix cache, because clients wait less for a head than for a token. A head that would go out
    before `ALONE_S` waits until then for a first token, with which it is one write.

    A batch is one write, or several if it is long. If the reader is slow, `send` returns late, and
    everything ready by then is one write.

    Args:
        keepalive: returns the bytes that keep a silent stream open.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        run: GenerationStream,
        renderer: Renderer,
        *,
        keepalive: Callable[[], bytes] = lambda: COMMENT,
    ) -> None:
        super().__init__(media_type=self.media_type)
        self._run = run
        self._renderer = renderer
        self._keepalive = keepalive
        self._loop = asyncio.get_running_loop()
        self._started = self._opened = False
        """Whether the head is being sent, and whether it was."""
        self._beside: list[asyncio.Task[None]] = []
        """Tasks that run while events are sent."""
        self._head = asyncio.Lock()
        self._within = False  # a batch, where nothing else can stand
        self._silent_since = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A task of its own, so that a token does not resume every middleware around this one.
        streaming = asyncio.create_task(self._attended(receive, send))
        try:
            last = await streaming
            await cancel_and_wait(*self._beside)  # most have ended by now
            if isinstance(last, Failed):
                await error_response(scope, last.error)(scope, receive, send)
                return
            # Now, so that who asks again after the answer finds its slot free.
            await self._write(send, self._end(last), last=True)
        finally:
            await cancel_and_wait(streaming)
            await cancel_and_wait(*self._beside)
            note_run(scope, self._run)

    async def _attended(self, receive: Receive, send: Send) -> Iterable[bytes] | Failed:
        """Do as `_stream`, while a task watches the client and, from `ALONE_S` on, one the time.

        Cancel these tasks without waiting for their end, which would delay the last write by three
        turns of the event loop.
        """
        self._silent_since = self._loop.time()
        beside = self._beside
        beside.append(asyncio.create_task(abort_when_gone(receive, self._run)))
        attend = self._loop.call_later(
            ALONE_S, lambda: beside.append(asyncio.create_task(self._attend(send)))
        )
        try:
            return await self._stream(send)
        finally:
            attend.cancel()
            for task in beside:
                task.cancel()

    async def _stream(self, send: Send) -> Iterable[bytes] | Failed:
        """Send all batches but the last one. Return that one's chunks, which are one write with
        what follows them, or the failure with which the engine refused the request.
        """
        running = len(self._run.choices)
        async with aclosing(self._run.batches()) as batches:
            async for batch in batches:
                if not self._started and (refusal := _refusal(batch)) is not None:
                    return refusal
                pieces = self._renderer.render(batch)
                for _, event in batch:
                    if isinstance(event, Finished | Failed):
                        running = 0 if isinstance(event, Failed) else running - 1
                if not running:
                    return pieces
                await self._write(send, pieces)
        return ()

    def _end(self, closing: Iterable[bytes]) -> Iterator[bytes]:
        yield from closing
        yield self._renderer.end()

    async def _write(self, send: Send, pieces: Iterable[bytes], *, last: bool = False) -> None:
        """Send pieces in writes of at least `WRITE` bytes, with a turn of the event loop after
        each. The final write is shorter.
        """
        self._within = True
        try:
            if not self._opened:
                await self._start(send)
            held: list[bytes] = []
            size = 0
            for piece in pieces:
                held.append(piece)
                size += len(piece)
                if size >= WRITE:
                    await self._send_body(send, b"".join(held))
                    await asyncio.sleep(0)
                    held, size = [], 0
            if size or last:
                await self._send_body(send, b"".join(held), last=last)
        finally:
            self._within = False

    async def _send_body(self, send: Send, body: bytes, *, last: bool = False) -> None:
        self._silent_since = self._loop.time()
        await send({"type": "http.response.body", "body": body, "more_body": not last})

    async def _start(self, send: Send) -> None:
        """Send the head once. Concurrent callers wait until it is sent."""
        async with self._head:
            if not self._started:
                self._started = True
                await self._send_head(send)
                self._opened = True

    async def _send_head(self, send: Send) -> None:
        headers = {
            "content-type": f"{self.media_type}; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **run_headers(self._run),
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _attend(self, send: Send) -> None:
        """Send the head of an accepted stream before its first event, then keepalives."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._silent_since + KEEPALIVE_S):
                await self._run.accepted()
            with suppress(TimeoutError):
                async with asyncio.timeout(HEAD_S):
                    await self._run.placed()
            if not self._run.failed:
                await self._start(send)
        await self._keep_alive(send)

    async def _keep_alive(self, send: Send) -> None:
        """Send keepalives during silence, before the first token and while a call is held back."""
        clock = self._loop.time
        while True:
            rest = self._silent_since + KEEPALIVE_S - clock()
            if rest > 0:
                await asyncio.sleep(rest)
            elif self._within:  # the reader is slow, and has something to read
                self._silent_since = clock()
            else:
                await self._start(send)
                await self._send_body(send, self._keepalive())


def _refusal(batch: list[ChoiceEvent]) -> Failed | None:
    """Return the failure at the start of a stream, if there is one."""
    match batch[:1]:
        case [(_, Failed() as failed)]:
            return failed
        case _:
            return None
