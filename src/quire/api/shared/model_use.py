"""Holds a request's model, and keeps the client's connection alive while the model loads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.shared.errors import speaks_anthropic, speaks_ollama
from quire.api.shared.sse import COMMENT, KEEPALIVE_S
from quire.serving.model import Lease
from quire.serving.tasks import cancel_and_wait

_USE = "quire.model_use"
Result = TypeVar("Result")


def use_of(scope: Scope) -> ModelUse:
    """Return the model use of the request with this `scope`, on a route with `HoldsModel`."""
    use: ModelUse = scope[_USE]
    return use


class ModelUse:
    """One request's hold on its model.

    A stream may have to start while its model is still loading, so that the connection does not
    look dead. Only comments are sent then; an answer that turns out to be an error is sent as the
    protocol's event.
    """

    def __init__(self, path: str, send: Send) -> None:
        self._path = path
        self._send = send
        self._started = False
        self._lease: Lease | None = None
        self._released = False
        self._error: bytearray | None = None

    async def take(self, lease: Awaitable[Lease]) -> Lease:
        """Wait for a lease on a model, and hold it until the answer was sent.

        Nothing is awaited between getting the lease and storing it, so that no cancellation loses
        it.
        """
        self._lease = await lease
        if self._released:
            self._lease.release()
        return self._lease

    def release(self) -> None:
        """Release the model after the answer was sent or its reader left."""
        self._released = True
        if self._lease is not None:
            self._lease.release()

    async def waiting(self, work: Awaitable[Result], *, streams: bool) -> Result:
        """Return the result of `work`. Meanwhile a streaming client gets comments."""
        told = streams and not speaks_ollama(self._path)  # whose streams have no comments
        keeper = asyncio.create_task(self._keep_alive()) if told else None
        try:
            return await work
        finally:
            if keeper is not None:
                await cancel_and_wait(keeper)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEPALIVE_S)
            if not self._started:
                self._started = True
                headers = [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                ]
                start = {"type": "http.response.start", "status": 200, "headers": headers}
                await self._send(start)
            await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def send(self, message: Message) -> None:
        """Forward an ASGI message of the application."""
        if not self._started:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._error = None if message["status"] == 200 else bytearray()
        elif self._error is None:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body"):
                event = {"type": "http.response.body", "body": self._error_event()}
                await self._send(event)

    def _error_event(self) -> bytes:
        """Return a whole error's body as the last event of a stream."""
        body = json.loads(self._error or b"{}")
        if speaks_anthropic(self._path):
            return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"
        if self._path.startswith("/v1/responses"):
            error = body["error"]
            told = {"type": "error", "sequence_number": 0}
            told |= {key: error.get(key) for key in ("code", "message", "param")}
            return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"
        return b"data: " + json.dumps(body).encode() + b"\n\n"


class HoldsModel:
    """Route middleware: a request holds its model until the last byte of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        use = scope[_USE] = ModelUse(scope["path"], send)
        try:
            await self._app(scope, receive, use.send)
        finally:
            use.release()
