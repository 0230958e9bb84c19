"""What hostile clients send, again and again, beside ordinary load."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

CHAT = "/v1/chat/completions"
_HOLD_S = 2.0

Attack = Callable[["Target", random.Random], int | None]
"""Makes one attempt; the status it got, or None where there can be none."""


@dataclass(frozen=True)
class Target:
    """A server, and the model that it serves."""

    url: str
    model: str

    def post(self, path: str, body: dict[str, Any]) -> int:
        """The status of a request that is answered."""
        with httpx.Client(base_url=self.url, timeout=120) as client:
            return client.post(path, json={"model": self.model, "max_tokens": 2} | body).status_code

    def ask(self, **fields: Any) -> int:
        """The same, of a chat completion."""
        return self.post(CHAT, {"messages": [{"role": "user", "content": "Hello"}]} | fields)

    def connect(self) -> socket.socket:
        """A bare connection."""
        parts = urlsplit(self.url)
        return socket.create_connection((parts.hostname, parts.port), timeout=30)


def bad_schema(target: Target, draw: random.Random) -> int:
    """Schemas that ended the process, or kept it busy."""
    links: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1200)}
    links["a1200"] = {"type": "string"}
    schema = draw.choice(
        (
            {"enum": [-(2**63)]},
            {"const": -(2**63)},
            {"type": "string", "pattern": "^(a{1000}){1000}$"},
            {"$defs": links, "$ref": "#/$defs/a0"},
        )
    )
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return target.ask(response_format=form)


def many_blocks(target: Target, draw: random.Random) -> int:
    """Many small parts of one message."""
    blocks = [{"type": "text", "text": "a"}] * draw.choice((2_000, 20_000))
    messages = [{"role": "user", "content": blocks}]
    return target.post("/v1/messages/count_tokens", {"messages": messages})


def no_messages(target: Target, draw: random.Random) -> int:
    """A list of what are no messages."""
    return target.ask(messages=[1] * draw.choice((10_000, 500_000)))


def many_stops(target: Target, draw: random.Random) -> int:
    """A long stop string, and many choices."""
    return target.ask(stop="ab" * 20_000, n=draw.choice((8, 128)))


def bad_image(target: Target, draw: random.Random) -> int:
    """Images that are none, and paths of many parts."""
    url = draw.choice(("data:,%%%" * 100_000, "file:///" + "a/" * 100_000, "http://127.0.0.1/"))
    part = {"type": "image_url", "image_url": {"url": url}}
    return target.ask(messages=[{"role": "user", "content": [part]}])


def half_sent(target: Target, draw: random.Random) -> None:
    """Requests whose body never comes."""
    sockets = [target.connect() for _ in range(draw.choice((5, 30)))]
    for each in sockets:
        each.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        each.sendall(b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")
    time.sleep(_HOLD_S)
    for each in sockets:
        each.close()


def unread(target: Target, draw: random.Random) -> None:
    """A stream that nobody reads, and whose client leaves in its middle."""
    fields = {"stream": True, "ignore_eos": True, "max_tokens": 500, "n": 4}
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": target.model, "messages": messages} | fields).encode()
    head = f"Host: {urlsplit(target.url).netloc}\r\nContent-Type: application/json\r\n"
    with target.connect() as bare:
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        bare.sendall(f"POST {CHAT} HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode())
        bare.sendall(body)
        time.sleep(draw.uniform(0, _HOLD_S))


def noise(target: Target, draw: random.Random) -> None:
    """Bytes that are no HTTP."""
    with target.connect() as bare:
        bare.sendall(draw.randbytes(draw.choice((10, 100_000))))


ATTACKS: tuple[Attack, ...] = (
    bad_schema,
    many_blocks,
    no_messages,
    many_stops,
    bad_image,
    half_sent,
    unread,
    noise,
)
