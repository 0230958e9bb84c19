"""Clients of HTTP/1.0, which has no chunked encoding, get plain bodies that end with the
connection. Proxies ask so by default, nginx among them.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.api.conftest import Serve
from tests.support.server import RAW_HEAD
from tests.support.waiting import HANG_S

ASKED = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 20}


def answered(url: str, version: str, method: str = "POST", **fields: Any) -> tuple[str, str]:
    """Return the head and all bytes that follow until the server closes the connection."""
    body = json.dumps(ASKED | fields).encode() if method == "POST" else b""
    path = "/v1/chat/completions" if method == "POST" else "/health"
    lines = (
        f"{method} {path} HTTP/{version}",
        RAW_HEAD,
        f"content-length: {len(body)}",
        "expect: 100-continue",  # of HTTP/1.1; it is to be ignored in HTTP/1.0
    )
    where = httpx.URL(url)
    with socket.create_connection((where.host, where.port or 80), timeout=HANG_S) as client:
        # A client of HTTP/1.0 need not ask for the end.
        asks = "connection: keep-alive" if version == "1.0" else "connection: close"
        client.sendall("\r\n".join((*lines, asks)).encode() + b"\r\n\r\n" + body)
        read = b"".join(iter(lambda: client.recv(1 << 16), b""))
    head, _, rest = read.decode().partition("\r\n\r\n")
    return head.lower(), rest


def texts(stream: str) -> list[str]:
    events = stream.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    parsed = [json.loads(each.removeprefix("data: ")) for each in events[:-2]]
    return [each["choices"][0]["delta"].get("content", "") for each in parsed]


def test_a_stream_is_a_plain_body(serve: Serve) -> None:
    served = serve("Hello, all of you.")
    head, body = answered(served.url, "1.0", stream=True)
    assert head.startswith("http/1.1 200 ok")
    assert "connection: close" in head
    assert "transfer-encoding" not in head
    assert "".join(texts(body)) == "Hello, all of you."
    head, body = answered(served.url, "1.1", stream=True)
    assert head == "http/1.1 100 continue"
    assert "transfer-encoding: chunked" in body


@pytest.mark.parametrize("method", ["POST", "GET", "HEAD"])
def test_a_whole_answer_has_its_length(serve: Serve, method: str) -> None:
    head, body = answered(serve("Hello.").url, "1.0", method)
    assert head.startswith("http/1.1 200 ok")
    assert "connection: close" in head
    if method == "HEAD":
        assert body == ""
    else:
        assert f"content-length: {len(body)}" in head
        assert json.loads(body)
