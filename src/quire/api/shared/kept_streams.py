"""Streams that outlive their connection: their events are stored for a while and can be resumed.

A client names its request with `x-quire-stream`. The answer then continues when the client's
connection ends, and `GET /streams/{id}?after=N` continues after event N.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from pydantic import Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.shared.access import note_ignored
from quire.api.shared.auth import EVERYONE, caller_of
from quire.api.shared.context import until_gone
from quire.api.shared.headers import headers_of
from quire.api.shared.schema import Wire, parse
from quire.api.shared.sse import COMMENT, KEEPALIVE_S
from quire.core.errors import NotFound, Overloaded, RequestError
from quire.serving.tasks import cancel_and_wait

HEADER = "x-quire-stream"
_ID = re.compile(r"[\w-]{16,64}", re.ASCII)
_COUNT = 256
"""Most streams kept for one caller."""
_BYTES = 64 << 20
"""Most bytes of kept events, all callers together."""


class StreamQuery(Wire):
    """The position from which a stream is resumed."""

    after: int = Field(0, ge=0, strict=False, description="the number of the last event received")


class KeptStream:
    """One stored answer: its head, its last events and its readers.

    Attributes:
        head: the ASGI message that starts the answer; None until it was sent.
        dropped: number of first events that were dropped.
        size: bytes of the events that are kept.
        over: whether the answer has ended.
        stopped: set to stop the answer; the request then ends as if its client had left.
    """

    def __init__(self, grace_s: float) -> None:
        self.head: Message | None = None
        self.dropped = 0
        self.size = 0
        self.over = False
        self.stopped = asyncio.Event()
        self._grace_s = grace_s
        self._events: deque[bytes] = deque()
        self._rest = bytearray()
        self._readers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def last(self) -> int:
        """Number of the newest event; the first is 1."""
        return self.dropped + len(self._events)

    def start(self, head: Message) -> None:
        """Store the head of the answer."""
        self.head = head
        self._tell()

    def add(self, body: bytes) -> bytes:
        """Store the events that a piece of the body completes; return them with their numbers.

        Comments pass and are not stored. A body that is no event stream is one event.
        """
        seen = max(0, len(self._rest) - 1)
        self._rest += body
        if not self._is_events:
            return body
        shown = bytearray()
        while (end := self._rest.find(b"\n\n", seen)) >= 0:
            event = bytes(self._rest[: end + 2])
            del self._rest[: end + 2]
            seen = 0
            if not event.startswith(b":"):
                event = b"id: %d\n" % (self.last + 1) + event
                self._keep(event)
            shown += event
        return bytes(shown)

    def end(self) -> bytes:
        """Record that the answer has ended; return the rest of its body."""
        rest = bytes(self._rest)
        self._rest.clear()
        if rest:
            self._keep(rest)
        self.over = True
        self._tell()
        return rest if self._is_events else b""

    @property
    def _is_events(self) -> bool:
        headers: dict[bytes, bytes] = dict(self.head["headers"]) if self.head else {}
        return headers.get(b"content-type", b"").startswith(b"text/event-stream")

    def _keep(self, event: bytes) -> None:
        self._events.append(event)
        self.size += len(event)
        self._tell()

    def drop(self) -> int:
        """Drop the oldest event; return its bytes, 0 if there is none."""
        if not self._events:
            return 0
        size = len(self._events.popleft())
        self.dropped += 1
        self.size -= size
        return size

    def after(self, number: int) -> bytes | None:
        """Return the events after event `number`; None if some were dropped."""
        if number < self.dropped:
            return None
        skipped = number - self.dropped
        return b"".join(event for at, event in enumerate(self._events) if at >= skipped)

    async def changed(self, number: int) -> None:
        """Wait until there is a head, and an event after `number` or the end."""
        while self.head is None or (self.last <= number and not self.over):
            if self.over:
                return
            self._changed.clear()
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()

    def attach(self) -> None:
        """Count a reader."""
        self._readers += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def detach(self) -> None:
        """Count a reader that left. When the last one leaves, the answer stops after a while."""
        self._readers -= 1
        if not self._readers and not self.over:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._grace_s, self.stopped.set)


class KeptStreams:
    """The streams of one caller, by their ids. Lives as long as the server.

    Args:
        grace_s: seconds for which an answer continues without a reader, and is stored after its
            end.
        max_bytes: the most bytes of events. Finished streams are evicted first, then the oldest
            events of the growing stream.
    """

    def __init__(self, grace_s: float, max_bytes: int = _BYTES, max_count: int = _COUNT) -> None:
        self.grace_s = grace_s
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._streams: dict[str, KeptStream] = {}
        self.size = 0

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, stream_id: str) -> KeptStream:
        """Store a new stream.

        Raises:
            RequestError: the id is malformed or taken.
            Overloaded: the limit of streams is reached, and all of them still run.
        """
        if not _ID.fullmatch(stream_id):
            what = f"'{HEADER}' must be 16 to 64 letters, digits, '-' and '_'."
            raise RequestError(what, param=HEADER, code="invalid_value")
        if stream_id in self._streams:
            what = f"'{HEADER}' is the id of an existing stream; choose a new id."
            raise RequestError(what, param=HEADER, code="stream_exists")
        if len(self._streams) >= self._max_count and not self._evict():
            raise Overloaded(
                f"{self._max_count} resumable streams are running, which is this server's "
                f"limit. Wait for one to end, or send the request without '{HEADER}'.",
                code="too_many_requests",
            )
        stream = self._streams[stream_id] = KeptStream(self.grace_s)
        return stream

    def get(self, stream_id: str) -> KeptStream:
        """Return a stored stream. Raise `NotFound` if there is none of this id."""
        stream = self._streams.get(stream_id)
        if stream is None:
            raise NotFound(
                "There is no stream of this id. Streams are kept for "
                f"{self.grace_s:g} s after their end.",
                code="stream_not_found",
            )
        return stream

    def grown(self, stream: KeptStream, before: int) -> None:
        """Count the bytes that a stream has grown by since `before`, and evict to make room."""
        self.size += stream.size - before
        while self.size > self._max_bytes and self._evict():
            pass
        while self.size > self._max_bytes and (freed := stream.drop()):
            self.size -= freed

    def ended(self, stream_id: str) -> None:
        """Remove a finished stream after a while; at once if its request got no answer."""
        stream = self._streams[stream_id]
        if stream.head is None:
            self._forget(stream_id, stream)
            return
        loop = asyncio.get_running_loop()
        loop.call_later(self.grace_s, self._forget, stream_id, stream)

    def _evict(self) -> bool:
        """Remove the oldest finished stream. Return False if there is none."""
        for stream_id, stream in self._streams.items():
            if stream.over:
                self._forget(stream_id, stream)
                return True
        return False

    def _forget(self, stream_id: str, stream: KeptStream) -> None:
        if self._streams.get(stream_id) is stream:
            del self._streams[stream_id]
            self.size -= stream.size


class CallerStreams:
    """Stored streams by API key, so that keys cannot read each other's.

    Args:
        callers: callers of the API keys. Without any there is one for everyone.
        grace_s: see `KeptStreams`; 0 stores no streams.
    """

    def __init__(self, callers: Iterable[str], grace_s: float) -> None:
        who = set(callers) or {EVERYONE}
        self.offered = grace_s > 0
        self._of = {each: KeptStreams(grace_s, _BYTES // len(who)) for each in who}

    def of(self, scope: Scope) -> KeptStreams:
        """Return the streams of the request's caller."""
        return self._of[caller_of(scope)]

    async def resume(self, request: Request) -> Response:
        """Answer `GET /streams/{id}`."""
        query, unknown = parse(StreamQuery, dict(request.query_params), strict_fields=False)
        note_ignored(request.scope, unknown)
        stream = self.of(request.scope).get(request.path_params["id"])
        return Resumed(stream, query.after)

    async def stop(self, request: Request) -> Response:
        """Answer `DELETE /streams/{id}`: end the answer as if its client had left."""
        self.of(request.scope).get(request.path_params["id"]).stopped.set()
        return Response(status_code=204)


class Resumed(Response):
    """A stored stream from one of its events on, followed live."""

    def __init__(self, stream: KeptStream, after: int) -> None:
        super().__init__()
        self._stream = stream
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._stream.attach()
        try:
            with suppress(ClientDisconnect):
                await until_gone(receive, self._send(send))
        finally:
            self._stream.detach()

    async def _send(self, send: Send) -> None:
        stream, number = self._stream, self._after
        if number < stream.dropped or number > stream.last:
            raise NotFound(
                f"The stream is kept from event {stream.dropped + 1} to {stream.last}; "
                f"it cannot be resumed after event {number}.",
                param="after",
                code="events_not_kept",
            )
        await stream.changed(number - 1)
        if stream.head is None:
            raise NotFound("The request ended without an answer.", code="stream_not_found")
        await send({**stream.head, "headers": list(stream.head["headers"])})
        while (events := stream.after(number)) is not None:
            number = stream.last
            over = stream.over
            await send({"type": "http.response.body", "body": events, "more_body": not over})
            if over:
                return
            while not (stream.last > number or stream.over):
                try:
                    await asyncio.wait_for(stream.changed(number), KEEPALIVE_S)
                except TimeoutError:
                    await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        await send({"type": "http.response.body", "body": b""})  # fell behind what is kept


class KeepsStream:
    """Route middleware that stores the answers of requests that name a stream.

    To the inner application, the client leaves only when the stream is stopped.
    """

    def __init__(self, app: ASGIApp, streams: CallerStreams) -> None:
        self._app = app
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream_id = headers_of(scope).get(HEADER)
        if stream_id is not None and not self._streams.offered:
            note_ignored(scope, [HEADER])
            stream_id = None
        if stream_id is None:
            await self._app(scope, receive, send)
            return
        streams = self._streams.of(scope)
        held = Held(streams.open(stream_id), streams, receive, send=send, stream_id=stream_id)
        try:
            await self._app(scope, held.receive, held.send)
        finally:
            await held.close()


class Held:
    """The ASGI channels of a request whose answer is stored. Its client counts as a reader.

    Args:
        read: whether the request's body was read already.
    """

    def __init__(
        self,
        stream: KeptStream,
        streams: KeptStreams,
        receive: Receive,
        send: Send,
        stream_id: str,
        *,
        read: bool = False,
    ) -> None:
        self._stream = stream
        self._streams = streams
        self._receive = receive
        self._send = send
        self._id = stream_id
        self._watcher: asyncio.Task[None] | None = None
        self._present = True
        stream.attach()
        if read:
            self._watcher = asyncio.create_task(self._watch())

    async def receive(self) -> Message:
        if self._watcher is None:
            message = await self._receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                self._watcher = asyncio.create_task(self._watch())
            return message
        await self._stream.stopped.wait()
        return {"type": "http.disconnect"}

    async def _watch(self) -> None:
        """Detach the reader when the request's own client leaves."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        if self._present:
            self._present = False
            self._stream.detach()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (HEADER.encode(), self._id.encode())]
            message = {**message, "headers": headers}
            self._stream.start({**message, "headers": list(headers)})
        elif message["type"] == "http.response.body":
            before, ends = self._stream.size, not message.get("more_body")
            shown = self._stream.add(message.get("body", b""))
            if ends:
                shown += self._stream.end()
            self._streams.grown(self._stream, before)
            message = {**message, "body": shown}
        with suppress(OSError):  # the client left; the answer goes on
            await self._send(message)

    async def close(self) -> None:
        """Record that the request is over, however it ended."""
        if self._watcher is not None:
            await cancel_and_wait(self._watcher)
        if not self._stream.over:
            self._stream.end()
        self._leave()
        self._streams.ended(self._id)
