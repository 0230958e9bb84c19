"""Limits of requests: sizes, counts, and requests in flight."""

from __future__ import annotations

from itertools import chain

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.shared.compression import check_coding, unpacked
from quire.api.shared.headers import headers_of
from quire.core.errors import Overloaded, RequestError, TooLarge

MAX_HEADER_BYTES = 32 << 10

_BODIES = 16
"""Number of bodies of the largest size that may be held at a time."""
_SLOT = "quire.slot"
_HELD_BYTES = 512 << 20
"""Most bytes of unstreamed answers held at a time. Log-probabilities take many times their text."""
_HELD = "quire.held"


async def read_body(request: Request, limit: int, counted: Counted) -> bytes:
    """Return the whole body, unpacked if it came compressed.

    Raises:
        TooLarge: it is longer than `limit` bytes, packed or unpacked. A declared length is refused
            before reading.
        Overloaded: other bodies in memory leave no room.
        RequestError: it cannot be unpacked.
    """
    coding = check_coding(headers_of(request.scope).get("content-encoding", ""))
    declared = headers_of(request.scope).get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    pieces, size, more = list[bytes](), 0, True
    while more:  # not `request.stream`: most bodies are one message, which needs no generator
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more, piece = message.get("more_body", False), message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        counted.add(len(piece))
        pieces.append(piece)
    body = b"".join(pieces)
    if not coding:
        return body
    size = 0

    def take(more: int) -> None:
        nonlocal size
        size += more
        if size > limit:
            raise _too_large(limit)
        counted.add(more)

    return await unpacked(body, coding, take)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The body is larger than {limit:,} bytes.", code="request_too_large")


def check_headers(request: Request) -> None:
    """Check the headers of a request with a body.

    Raises:
        TooLarge: all headers together are longer than `MAX_HEADER_BYTES`.
        UnsupportedMediaType: the body has an unsupported compression.
    """
    size = sum(map(len, chain.from_iterable(request.scope["headers"])))
    if size > MAX_HEADER_BYTES:
        raise TooLarge(f"The headers are larger than {MAX_HEADER_BYTES:,} bytes.")
    check_coding(headers_of(request.scope).get("content-encoding", ""))


def check_count(items: int, limit: int, param: str) -> None:
    """Raise `RequestError` if a list has more entries than the operator allows."""
    if items > limit:
        raise RequestError(
            f"'{param}' holds {items} items; this server takes at most {limit}.",
            param=param,
            code="array_above_max_length",
        )


class Bodies:
    """Counts the bytes of all bodies in memory, over all requests."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def reading(self) -> Counted:
        """Return a context within which one body is counted."""
        return Counted(self)


class Counted:
    """One body while it arrives. As a context, it takes the body's bytes back at its end."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.size = 0

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *failure: object) -> None:
        self._bodies.held -= self.size

    def add(self, size: int) -> None:
        """Count bytes. Raise `Overloaded` if there is no room for them."""
        if self._bodies.held + size > self._bodies.limit:
            raise Overloaded(
                f"Request bodies in flight take {self._bodies.held} of {self._bodies.limit} "
                "bytes: try again later.",
                code="too_many_requests",
            )
        self._bodies.held += size
        self.size += size


class Slots:
    """Counts requests in flight whose bodies have arrived, over all endpoints."""

    def __init__(self, limit: int, body_bytes: int) -> None:
        self.limit = limit
        self.taken = 0
        self.held = 0
        self.bodies = Bodies(_BODIES * body_bytes)

    def check(self) -> None:
        """Raise `Overloaded` if there is no free slot."""
        if self.taken >= self.limit:
            raise Overloaded(
                f"{self.limit} requests are in flight, which is this server's limit "
                "(--max-concurrent): try again later.",
                code="too_many_requests",
            )

    def enter(self, scope: Scope) -> None:
        """Take a slot for a request whose body has arrived, once, if its route has slots.

        Raises:
            Overloaded: there is no free slot.
        """
        if scope.get(_SLOT) is False:
            self.check()
            self.taken += 1
            scope[_SLOT] = True

    def hold(self, scope: Scope, size: int) -> None:
        """Count bytes of an answer that are held until the request has ended.

        Raises:
            Overloaded: there is no room for them.
        """
        if self.held + size > _HELD_BYTES:
            raise Overloaded(
                f"Log-probabilities of unstreamed answers take {self.held:,} of "
                f"{_HELD_BYTES:,} bytes: set 'stream', or try again later.",
                param="logprobs",
                code="too_many_logprobs",
            )
        self.held += size
        scope[_HELD] = scope.get(_HELD, 0) + size

    def leave(self, scope: Scope) -> None:
        """Release the slot, if one was taken, and the counted bytes."""
        self.taken -= scope.pop(_SLOT)
        self.held -= scope.pop(_HELD, 0)


class Slotted:
    """Route middleware: a request holds a slot from its last byte to the last byte of its
    answer.
    """

    def __init__(self, app: ASGIApp, slots: Slots) -> None:
        self._app = app
        self._slots = slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._slots.check()
        scope[_SLOT] = False
        try:
            await self._app(scope, receive, send)
        finally:
            self._slots.leave(scope)
