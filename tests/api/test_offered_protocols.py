"""Requests that offer to go on in another protocol are answered in this one.

Java's client offers HTTP/2 with the first request of every connection, unless it is told not to.
"""

from __future__ import annotations

import json
import socket
from http.client import HTTPResponse

import httpx
import pytest

from tests.api.conftest import Serve, Served
from tests.support.server import RAW_HEAD
from tests.support.waiting import HANG_S

BODY = json.dumps({"messages": [{"role": "user", "content": "Hi."}]}).encode()
CHUNKS = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (9, BODY[:9], len(BODY) - 9, BODY[9:])
OFFER = "connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAA\r\nupgrade: h2c"
LENGTH = f"content-length: {len(BODY)}"


def request(*headers: str, body: bytes = BODY, method: str = "POST") -> bytes:
    lines = (f"{method} /v1/chat/completions HTTP/1.1", RAW_HEAD, *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


ASKED = {
    "length": request(OFFER, LENGTH),
    "chunks": request(OFFER, "transfer-encoding: chunked", body=CHUNKS),
    "options": request("Connection: keep-alive, upgrade", "Upgrade: h2c", LENGTH),
}


def connect(served: Served) -> socket.socket:
    url = httpx.URL(served.url)
    return socket.create_connection((url.host, url.port or 80), timeout=HANG_S)


def answer(client: socket.socket) -> tuple[int, bytes]:
    read = HTTPResponse(client)
    read.begin()
    return read.status, read.read()


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
@pytest.mark.parametrize("asked", ASKED)
def test_an_offer_of_http_2_is_declined(serve: Serve, asked: str, size: int) -> None:
    data = ASKED[asked]
    with connect(serve("Hello.")) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):  # the connection lives on
            for start in range(0, len(data), size):
                client.sendall(data[start : start + size])
            status, body = answer(client)
            assert status == 200, body
            assert json.loads(body)["choices"][0]["message"]["content"] == "Hello."


def test_what_is_asked_of_the_connection_still_holds(serve: Serve) -> None:
    asked = request("connection: close, Upgrade", "upgrade: h2c", LENGTH)
    with connect(serve("Hello.")) as client:
        client.sendall(asked)
        assert answer(client)[0] == 200
        assert client.recv(1) == b""


def test_a_head_that_is_wrong_is_refused_as_without_an_offer(serve: Serve) -> None:
    with connect(serve("Hello.")) as client:
        client.sendall(request(OFFER, LENGTH, "transfer-encoding: chunked"))
        assert answer(client)[0] == 400


@pytest.mark.parametrize(("method", "status"), [("GET", 200), ("CONNECT", 405)])
def test_no_other_protocol_is_spoken(serve: Serve, method: str, status: int) -> None:
    """GET lists stored completions, whatever protocol it offers."""
    offer = "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13"
    with connect(serve("Hello.")) as client:
        client.sendall(request(offer, "sec-websocket-key: x", body=b"", method=method))
        assert answer(client)[0] == status
