"""A load client cheap enough to share two cores with the server that it measures.

A worker keeps its connection if the server does.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from quire.cli.sse_counter import Dechunker, EventCounter, error_message
from quire.core.errors import QuireError

_LAST_CHUNK = b"\r\n0\r\n\r\n"
"""End of a chunked answer, after the end of the chunk before it."""
_EVENT_END = b"\n\n\r\n"
"""End of a server-sent event that is also the end of a chunk."""


class LoadError(QuireError):
    """Raised if a server cannot be measured: it is not reached, has no model, or a probe failed."""


@dataclass(frozen=True, slots=True)
class Target:
    """The address of requests.

    Attributes:
        path: path of the OpenAI routes, e.g. `/v1`.
        api_key: sent as a bearer token if given.
    """

    host: str
    port: int
    tls: bool
    path: str
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Target:
        """Parse `http://host:port`, with or without `/v1`.

        Raises:
            ValueError: not an http(s) URL with a host.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"not a URL: {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http:// or https:// URL: {url!r}")
        try:
            parts.hostname.encode("idna")  # as connecting will
        except UnicodeError as error:
            raise ValueError(f"not a host name: {parts.hostname[:80]!r}") from error
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/")
        path = path if path.endswith("/v1") else path + "/v1"
        return cls(parts.hostname, port or (443 if tls else 80), tls, path=path, api_key=api_key)

    @property
    def base(self) -> str:
        """The server's address, in the form that clients take."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    def request(self, method: str, route: str, body: bytes = b"") -> bytes:
        """Return the bytes of one HTTP/1.1 request; `route` follows `path`, e.g. `/completions`."""
        lines = [
            f"{method} {self.path}{route} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream, application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + body


def unreachable(where: str, error: Exception) -> str:
    """Return the message for a server that cannot be reached."""
    number = _number(error)
    reason = os.strerror(number) if number else str(error) or type(error).__name__
    return f"no server answers at {where} ({reason}): start `quire serve`, or name another by --url"


def _number(error: BaseException | None) -> int | None:
    """Return the errno of an error's cause, if there is one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno and error.errno > 0:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


@dataclass(frozen=True, slots=True)
class Timings:
    """Timings of one request's answer, in seconds of `time.perf_counter`.

    Attributes:
        text_times: when each event that carried text arrived.
        completion_tokens: from the server's usage; None if it gave none.
        error: why the request failed, or None.
    """

    started: float
    ended: float
    text_times: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Generated tokens by the server's count, else the number of events with text."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return len(self.text_times)

    @property
    def ttft(self) -> float | None:
        """Seconds from before the request to the first text; None if none came."""
        return self.text_times[0] - self.started if self.text_times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with text."""
        times = self.text_times
        return [times[i] - times[i - 1] for i in range(1, len(times))]


class Exchange:
    """One request and its answer.

    While a stream's reads end where its events end, they are only kept. `timings` decodes them,
    once the measurement is over: the server may need the core meanwhile.
    """

    def __init__(self, started: float) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.dropped = False
        """Whether the connection ended before any of the answer came."""
        self.whole = False
        """Whether all of the answer came, so that the connection can take the next request."""
        self._started = started
        self._reads: list[tuple[float, bytes]] = []
        """Bytes that are not decoded yet, with the times at which they came."""
        self._read_at = started
        self._ended: float | None = None
        self._error: str | None = None
        self._over = False
        self._head: bytes | None = b""  # None once the headers are read
        self._body = b""
        self._status = 0
        self._keeps_alive = False
        self._chunks: Dechunker | None = None
        self._missing: int | None = None
        """Bytes of the body that are still to come, where the server says how many there are."""
        self._events = EventCounter()

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the answer."""
        self._read_at = time.perf_counter()
        self._reads.append((self._read_at, data))
        if data.endswith(_LAST_CHUNK):
            self.whole = True
            self._finish()
        elif not data.endswith(_EVENT_END):
            self._decode()

    def lost(self) -> None:
        """Handle the end of the connection."""
        self.dropped = self._read_at == self._started
        self._decode()
        self._conclude()

    def end(self, error: str) -> None:
        """Finish with the answer so far. No effect once the answer is decoded."""
        self._read_at = time.perf_counter()
        self._decode()
        self._close(error)

    def timings(self) -> Timings:
        """Return the timings of the finished exchange."""
        self._decode()
        self._conclude()
        prompt, completion, cached = self._events.usage()
        return Timings(
            started=self._started,
            ended=self._ended or self._read_at,
            text_times=tuple(self._events.text_times),
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=cached,
            error=self._events.error or self._error,
        )

    def _decode(self) -> None:
        """Decode the bytes that were kept."""
        reads, self._reads = self._reads, []
        for now, data in reads:
            if self._over:
                return
            try:
                rest = data if self._head is None else self._read_head(data)
                if self._head is None:
                    self._read_body(rest, now)
            except ValueError as error:
                self._close(f"the answer is not HTTP: {error}")

    def _conclude(self) -> None:
        """Finish with what was decoded; an answer that is not whole is an error."""
        if self._status and self._status != 200:
            self._close(f"HTTP {self._status}: {error_message(self._body)}")
        elif self._events.done:
            self._close(error=None)
        elif self._head is not None:
            self._close("the server closed the connection without an answer")
        else:
            self._close("the stream ended without [DONE]")

    def _close(self, error: str | None) -> None:
        if not self._over:
            self._over, self._error = True, error
        self._finish()

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def _read_head(self, data: bytes) -> bytes:
        assert self._head is not None
        head, separator, rest = (self._head + data).partition(b"\r\n\r\n")
        if not separator:
            self._head = head
            return b""
        first, *lines = head.split(b"\r\n")
        self._status = int(first.split(b" ", 2)[1]) if first.startswith(b"HTTP/1.") else 0
        if not self._status:
            raise ValueError(first[:80].decode("latin-1"))
        self._head = None
        self._keeps_alive = first.startswith(b"HTTP/1.1")
        for line in lines:
            name, _, value = line.lower().partition(b":")
            if name == b"transfer-encoding" and b"chunked" in value:
                self._chunks = Dechunker()
            elif name == b"content-length":
                self._missing = int(value)
            elif name == b"connection" and b"close" in value:
                self._keeps_alive = False
        return rest

    def _read_body(self, data: bytes, now: float) -> None:
        if self._chunks is not None:
            data = self._chunks.feed(data)
        elif self._missing is not None:
            self._missing -= len(data)
        if self._status != 200:
            self._body += data
        else:
            self._events.feed(data, now)
            if self._events.done and self._ended is None:
                self._ended = now
        if self._chunks is not None:
            whole = self._chunks.done
        elif self._missing is not None:
            whole = self._missing <= 0
        else:  # only the connection's end would tell
            whole = False
            if self._events.done:
                self._conclude()
        if whole:
            self.whole = self._keeps_alive
            self._conclude()


class _Connection(asyncio.Protocol):
    """A connection that carries one exchange after another."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None

    @property
    def open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, request: bytes, exchange: Exchange) -> None:
        """Send a request; `exchange` gets its answer."""
        assert self._transport is not None
        self._exchange = exchange
        self._transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, not a check: uvloop's transports have the methods but not the base class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._exchange is not None:
            self._exchange.lost()

    def close(self) -> None:
        """Close at once, dropping data in transit."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


class Client:
    """Sends one request after another, on one connection if the server keeps it open.

    SDKs pool connections likewise; opening one for each request would be measured, too.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._tls = ssl.create_default_context() if target.tls else None
        self._connection: _Connection | None = None

    async def send(self, route: str, body: bytes, timeout_s: float) -> Exchange:
        """Send a streaming request and read its answer to the end. Failures are recorded, never
        raised.
        """
        request = self._target.request("POST", route, body)
        kept = self._connection is not None and self._connection.open
        exchange = await self._exchange(request, timeout_s)
        if kept and exchange.dropped:  # the server had closed what it had kept
            exchange = await self._exchange(request, timeout_s)
        return exchange

    async def _exchange(self, request: bytes, timeout_s: float) -> Exchange:
        exchange = Exchange(time.perf_counter())
        late = f"no complete answer within {timeout_s:g} s"
        timer = asyncio.get_running_loop().call_later(timeout_s, exchange.end, late)
        try:
            connection = self._connection
            if connection is None or not connection.open:
                async with asyncio.timeout(timeout_s):
                    connection = await self._connect()
            connection.ask(request, exchange)
            await exchange.finished
        except TimeoutError:
            exchange.end(late)
        except OSError as error:
            exchange.end(unreachable(self._target.base, error))
        finally:
            timer.cancel()
            if not exchange.whole:
                self.close()
        return exchange

    async def _connect(self) -> _Connection:
        loop, target = asyncio.get_running_loop(), self._target
        _, self._connection = await loop.create_connection(
            _Connection, target.host, target.port, ssl=self._tls
        )
        return self._connection

    def close(self) -> None:
        """Close the connection. The next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


async def send(target: Target, route: str, body: bytes, timeout_s: float) -> Timings:
    """Send a request on a connection of its own; return its timings."""
    client = Client(target)
    try:
        return (await client.send(route, body, timeout_s)).timings()
    finally:
        client.close()


async def closed_loop(
    target: Target,
    route: str,
    bodies: Sequence[bytes],
    concurrency: int,
    timeout_s: float,
    done: Callable[[Exchange], None] = lambda exchange: None,
) -> list[Exchange]:
    """Send all bodies with `concurrency` in flight; each worker sends the next as soon as it is
    free.

    Args:
        done: called with each finished exchange.
    """
    waiting = iter(bodies)
    exchanges: list[Exchange] = []

    async def worker() -> None:
        client = Client(target)
        try:
            for body in waiting:
                exchanges.append(await client.send(route, body, timeout_s))
                done(exchanges[-1])
        finally:
            client.close()

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(bodies)))))
    return exchanges
