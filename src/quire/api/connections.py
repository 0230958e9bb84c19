"""Connections: how answers are written to them, and time limits for slow, silent or many clients.

A head has to arrive within a time, a body at a rate, and responses have to be read. The number of
an address's connections without a complete request is limited; beyond it, the oldest one is closed.
So is the oldest of any address near the limit on open files.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.core.processes import surplus_descriptors

log = logging.getLogger("quire.server")

_MAX_HEAD = 128 << 10  # bytes
_MAX_AHEAD = 16  # requests of a connection that are read while one is answered
_OF_OFFERS = {b"upgrade", b"http2-settings"}
"""Headers, and options of `Connection`, by which a client offers to switch protocols."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Timeouts of one connection, in seconds.

    Attributes:
        head_s: for a request's head, from its first byte.
        body_s: for a body, in addition to its time at `body_rate` bytes a second.
        write_s: for the client to read any of the sent bytes.
        idle_s: for the first byte of a connection's first or next request. Longer than clients and
            proxies keep idle connections (httpx 5 s, nginx 60 s, Go 90 s), which they also open in
            reserve. If the server closed first while a client writes, the request would be lost,
            and clients do not repeat a POST.
        unfinished: the most connections of one address without a complete request.
    """

    head_s: float = 20.0
    body_s: float = 20.0
    body_rate: int = 16 << 10
    write_s: float = 60.0
    idle_s: float = 120.0
    unfinished: int = 256

    @property
    def look_s(self) -> float:
        """Seconds between two checks of a connection."""
        return min(self.head_s, self.body_s, self.write_s) / 4


class _Parser(HttpRequestParser):
    """A parser that accepts no upgrade to another protocol.

    Java's client offers HTTP/2 with the first request of every connection. httptools alone would
    treat the offer as accepted and the rest as that protocol's data, so that uvicorn would answer a
    request without its body.
    """

    def __init__(self, protocol: LimitedProtocol) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self._protocol = protocol

    @property
    def offered(self) -> bool:
        """Whether the head offers another protocol. CONNECT does not count."""
        return bool(self.should_upgrade()) and self.get_method() != b"CONNECT"

    def feed_data(self, data: Any) -> None:
        """Parse received bytes. Raises httptools' errors."""
        try:
            super().feed_data(data)
        except HttpParserUpgrade as end:
            if not self.offered:
                raise
            self._protocol.decline(data[end.args[0] :])


async def _send_unchunked(cycle: RequestResponseCycle, message: Any) -> None:
    """Send a part of an answer without chunks, which HTTP/1.0 does not have. The end of the
    connection ends the body; uvicorn would send chunks if the length is unknown.
    """
    cycle.chunked_encoding = False
    if message["type"] == "http.response.body":
        cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, message)


class _HeadWithBody:
    """The transport of one answer: the head waits until the end of the event loop's turn for a body
    to go out in the same write. A write wakes the client, and costs more than rendering a token.
    """

    def __init__(
        self, transport: asyncio.Transport, call_soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._transport = transport
        self._call_soon = call_soon
        self._held: bytes | None = b""
        """Bytes that wait for the next write; None once something was written."""

    def write(self, data: bytes) -> None:
        """Write bytes after those that were held back; hold the first ones."""
        if self._held is None:
            self._transport.write(data)
        elif self._held:
            data = self._held + data
            self._held = None
            self._transport.write(data)
        else:
            self._held = data
            self._call_soon(self._release)

    def _release(self) -> None:
        held, self._held = self._held, None
        if held and not self._transport.is_closing():
            self._transport.write(held)

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or closes once all was sent."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once all was sent."""
        self._release()
        self._transport.close()


class LimitedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with time limits. Uvicorn alone would wait for slow clients forever.

    An answer's head goes out with the first of its body, if that is ready.
    """

    limits = ConnectionLimits()

    parser: _Parser

    _in_head = True
    _received = 0  # bytes of the head or body that is being read
    _ended = False  # whether a message ended in what was received last
    _since = 0.0  # when the head or body started that is being read
    _unread = 0  # bytes that were written and not read, when last looked at
    _unread_since = 0.0
    _timer: asyncio.TimerHandle | None = None
    _unanswered: tuple[RequestResponseCycle, ...] = ()

    @property
    def unfinished(self) -> bool:
        """Whether it is open, and no complete request waits for an answer."""
        answered: bool = self.cycle is None or self.cycle.response_complete
        return (answered or self.cycle.more_body) and not self.transport.is_closing()

    # uvicorn narrows the type of asyncio's own method.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = _Parser(self)
        # Uvicorn's option is in whole seconds; it only hands this to `loop.call_later`.
        self.timeout_keep_alive = self.limits.idle_s  # type: ignore[assignment]
        self._since = self._unread_since = self.loop.time()
        self._make_room()
        self._timer = self.loop.call_later(self.limits.look_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self._unanswered:  # uvicorn tells the last one alone
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._ended = False
        if self._in_head and not self._received:
            self._since = self.loop.time()
        self._received += len(data)
        super().data_received(data)
        if self._in_head and not self._ended and self._received > _MAX_HEAD:
            self.send_400_response("The request line and headers are too long.")

    def decline(self, rest: bytes) -> None:
        """Parse the request's head again, without its offer of another protocol.

        Args:
            rest: bytes received after the head.
        """
        line = b"%s %s HTTP/%s" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        head = [line, *(b"%s: %s" % each for each in _without_offer(self.headers)), b"", b""]
        self.parser = _Parser(self)
        self.parser.feed_data(b"\r\n".join(head) + rest)

    def on_headers_complete(self) -> None:
        if self.parser.offered:
            return
        super().on_headers_complete()
        # Uvicorn makes the cycle, and takes no other class for it: its members are replaced.
        if self.scope["http_version"] == "1.0":
            self.cycle.send = partial(_send_unchunked, self.cycle)  # type: ignore[method-assign]
            self.cycle.waiting_for_100_continue = False  # no status of HTTP/1.0
        # A cycle calls `write`, `is_closing` and `close` of its transport, no other method.
        held = _HeadWithBody(self.transport, self.loop.call_soon)
        self.cycle.transport = held  # type: ignore[assignment]
        waiting = (each for each in self._unanswered if not each.response_complete)
        self._unanswered = (*waiting, self.cycle)
        if 1 < len(self._unanswered) <= _MAX_AHEAD:
            # Uvicorn reads no further here, and would not see that the client leaves.
            self.flow.resume_reading()
        self._in_head, self._received, self._since = False, 0, self.loop.time()

    def on_message_complete(self) -> None:
        if self.parser.offered:
            return
        super().on_message_complete()
        self._in_head, self._received, self._ended = True, 0, True

    def _make_room(self) -> None:
        """Close the oldest of this address's unfinished connections if this one exceeds the
        limit. Close the oldest of all addresses while there is hardly a file left to open.
        """
        others = [
            each for each in cast("set[Any]", self.connections) if isinstance(each, LimitedProtocol)
        ]
        host = self.client and self.client[0]
        unfinished = sorted((each for each in others if each.unfinished), key=_began)
        mine = [each for each in unfinished if (each.client and each.client[0]) == host]
        young = self.loop.time() - mine[0]._since < self.limits.head_s / 10  # may be a burst
        if len(mine) > self.limits.unfinished and not young:
            mine[0].transport.abort()
        surplus = surplus_descriptors(self.transport.get_extra_info("socket").fileno())
        if surplus:
            _warn_of_descriptors()
            closing = sum(each.transport.is_closing() for each in others)
            for each in unfinished[: max(0, surplus - closing)]:
                each.transport.abort()

    def _look(self) -> None:
        """Close the connection if its client is too slow."""
        if self._writes_stuck():
            self.transport.abort()
        elif self._never_used():
            self.transport.close()  # an answer would be read as that of a request sent meanwhile
        elif self._reads_stuck() and not self.transport.is_closing():
            self.send_400_response("The request was not complete in time.")
        self._timer = self.loop.call_later(self.limits.look_s, self._look)

    def _writes_stuck(self) -> bool:
        unread, now = self.transport.get_write_buffer_size(), self.loop.time()
        if not unread or unread != self._unread:
            self._unread, self._unread_since = unread, now
        return now - self._unread_since > self.limits.write_s

    def _never_used(self) -> bool:
        """Return whether no byte came within `idle_s`. Uvicorn closes after later requests."""
        unused = self.cycle is None and self._in_head and not self._received
        return unused and self.loop.time() - self._since > self.limits.idle_s

    def _reads_stuck(self) -> bool:
        """Return whether a head or a body that has begun is late."""
        elapsed = self.loop.time() - self._since
        if self._in_head:
            return self._received > 0 and elapsed > self.limits.head_s
        allowed = self.limits.body_s + self._received / self.limits.body_rate
        return not self.flow.read_paused and elapsed > allowed


def _began(connection: LimitedProtocol) -> float:
    return connection._since


@cache
def _warn_of_descriptors() -> None:
    """Log once that the limit on open files is near."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    log.warning(
        "Connections closed to stay within the limit of %d open files, the oldest idle ones first. "
        "Raise the limit (`ulimit -Hn` in a shell, LimitNOFILE= in a systemd unit).",
        limit,
    )


def _without_offer(headers: list[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield a request's headers except an offer to upgrade the protocol."""
    for name, value in headers:
        if name == b"connection":
            options = [each.strip() for each in value.split(b",")]
            value = b", ".join(each for each in options if each.lower() not in _OF_OFFERS)
        if name not in _OF_OFFERS:
            yield name, value
