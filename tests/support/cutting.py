"""Requests that are cut off at a chosen await: the task is cancelled, or the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.types import ASGIApp, Message

Way = Literal["cancelled", "left"]


@dataclass
class CutOff:
    """One request to an application, cut off when it awaits for the time number `at`.

    Attributes:
        awaits: how often it has awaited so far.
        status: of its answer; None before that.
        text: of its answer, as far as it came.
    """

    app: ASGIApp
    way: Way
    at: int
    method: str
    path: str
    body: object = None
    headers: tuple[tuple[bytes, bytes], ...] = ()
    awaits: int = 0
    status: int | None = None
    text: bytes = b""
    _gone: asyncio.Event = field(default_factory=asyncio.Event)
    _read: bool = False

    @property
    def cut(self) -> bool:
        """Whether the request came to the await at which it is cut off."""
        return self.awaits > self.at

    async def run(self) -> None:
        """Sends the request; returns when the application is done with it."""
        task = asyncio.ensure_future(self._counted())
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _counted(self) -> None:
        await _Counted(self)

    def start(self) -> Generator[Any, None, None]:
        """Yield the application's own coroutine, as an iterator over its awaits."""
        data = b"" if self.body is None else json.dumps(self.body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(data)).encode()),
                *self.headers,
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 1),
        }

        async def receive() -> Message:
            if not self._read:
                self._read = True
                return {"type": "http.request", "body": data, "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            self.text += message.get("body", b"")
            await asyncio.sleep(0)

        return self.app(scope, receive, send).__await__()  # type: ignore[no-any-return, attr-defined]

    def waits(self) -> None:
        """Count an await, and cut the request off at the chosen one."""
        self.awaits += 1
        if self.awaits != self.at + 1:
            return
        self._gone.set()
        if self.way == "cancelled":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()


class _Counted:
    def __init__(self, request: CutOff) -> None:
        self._request = request

    def __await__(self) -> Generator[Any, None, None]:
        steps = self._request.start()
        thrown: BaseException | None = None
        while True:
            try:
                awaited = steps.send(None) if thrown is None else steps.throw(thrown)
            except StopIteration:
                return
            self._request.waits()
            thrown = None
            try:
                yield awaited
            except BaseException as error:
                thrown = error
