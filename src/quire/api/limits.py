"""What one client may ask of the server: sizes, counts, requests at once."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import Overloaded, RequestError, TooLarge

MAX_HEADER_BYTES = 32 << 10


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises:
        TooLarge: it is longer than `limit` bytes; refused before it is read if it says so.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        pieces.append(piece)
    return b"".join(pieces)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The body is larger than {limit} bytes.", code="request_too_large")


def check_headers(request: Request) -> None:
    """Raises `TooLarge` if the headers together are longer than `MAX_HEADER_BYTES`."""
    size = sum(len(name) + len(value) for name, value in request.headers.raw)
    if size > MAX_HEADER_BYTES:
        raise TooLarge(f"The headers are larger than {MAX_HEADER_BYTES} bytes.")


def check_count(items: int, limit: int, param: str) -> None:
    """Raises `RequestError` if a list holds more than the operator allows."""
    if items > limit:
        raise RequestError(
            f"'{param}' holds {items} items; this server takes {limit}.",
            param=param,
            code="array_above_max_length",
        )


class Slots:
    """Counts the generating requests in flight, over all endpoints."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    def __enter__(self) -> None:
        if self.taken >= self.limit:
            raise Overloaded(
                f"{self.limit} requests are in flight, which is as many as this server takes.",
                code="too_many_requests",
            )
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        self.taken -= 1


class Slotted:
    """Route middleware: a slot is held until the last byte of the answer is sent."""

    def __init__(self, app: ASGIApp, slots: Slots) -> None:
        self._app = app
        self._slots = slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._slots:
            await self._app(scope, receive, send)
