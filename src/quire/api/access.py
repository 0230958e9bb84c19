"""One structured line a request, and the header by which a client can name its request."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("quire.access")

_KEY = "quire.note"


def note(scope: Scope, details: dict[str, Any]) -> None:
    """Adds fields to the log line of the request that `scope` belongs to."""
    scope.setdefault(_KEY, {}).update(details)


class AccessLog:
    """Outermost middleware: names each request, times it, logs it as one line of JSON."""

    def __init__(self, app: ASGIApp, observe: Callable[[str, int, float], None]) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, started, status = uuid.uuid4().hex, time.perf_counter(), 0
        details = scope.setdefault(_KEY, {})

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            seconds = time.perf_counter() - started
            self._observe(scope["path"], status, seconds)
            line = {
                "id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "ms": round(seconds * 1000, 1),
                **details,
            }
            log.info("%s", json.dumps(line))
