"""Hostile requests that are sent again and again beside ordinary load."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx
import PIL.Image

from quire.api.shared.signing import Signer

CHAT = "/v1/chat/completions"
_HOLD_S = 2.0
_STOP_S = 2.5
ENGINE_TIMEOUT_S = 8
"""The server's limit: an engine that stops for `_STOP_S` misses a sign of life, and is not
given up."""
_STOPPING = threading.Lock()

Attack = Callable[["Target", random.Random], int | None]
"""Makes one attempt; the status it got, or None where there can be none."""


@dataclass(frozen=True)
class Target:
    """A server, the model that it serves, and its engine's process."""

    url: str
    model: str
    engine: int

    def post(self, path: str, body: dict[str, Any], leave_s: float = 120) -> int:
        """Return the status of a request that is answered; its client leaves after some seconds."""
        with httpx.Client(base_url=self.url, timeout=leave_s) as client:
            return client.post(path, json={"model": self.model, "max_tokens": 2} | body).status_code

    def ask(self, **fields: Any) -> int:
        """Send a chat completion."""
        return self.post(CHAT, {"messages": [{"role": "user", "content": "Hello"}]} | fields)

    def connect(self) -> socket.socket:
        """Return a bare connection."""
        parts = urlsplit(self.url)
        return socket.create_connection((parts.hostname, parts.port), timeout=30)


def bad_schema(target: Target, draw: random.Random) -> int:
    """Send schemas that once ended the process or kept it busy."""
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
    """Send a message of many small parts."""
    blocks = [{"type": "text", "text": "a"}] * draw.choice((2_000, 20_000))
    messages = [{"role": "user", "content": blocks}]
    return target.post("/v1/messages/count_tokens", {"messages": messages})


def no_messages(target: Target, draw: random.Random) -> int:
    """Send a list of values that are no messages."""
    return target.ask(messages=[1] * draw.choice((10_000, 500_000)))


def many_stops(target: Target, draw: random.Random) -> int:
    """Send a long stop string, and ask for many choices."""
    return target.ask(stop="ab" * 20_000, n=draw.choice((8, 128)))


def bad_image(target: Target, draw: random.Random) -> int:
    """Send images that are none, and paths of many parts."""
    url = draw.choice(("data:,%%%" * 100_000, "file:///" + "a/" * 100_000, "http://127.0.0.1/"))
    part = {"type": "image_url", "image_url": {"url": url}}
    return target.ask(messages=[{"role": "user", "content": [part]}])


@cache
def _jpeg(side: int) -> str:
    """Return a square picture whose file is small."""
    file = io.BytesIO()
    PIL.Image.new("L", (side, side), 128).save(file, "jpeg", progressive=True, quality=10)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def bomb(target: Target, draw: random.Random) -> int:
    """Send images that are small files and large when decoded; if they are allowed, the client
    leaves while they are.
    """
    side = draw.choice((4_000, 9_000))
    part = {"type": "image_url", "image_url": {"url": _jpeg(side)}}
    body = {"messages": [{"role": "user", "content": [part] * 6}]}
    return target.post(CHAT, body, leave_s=120 if side > 7_000 else draw.uniform(0.2, 1.0))


@cache
def _signed() -> str:
    return Signer("stranger").pack("a" * (8 << 20))


def signed(target: Target, draw: random.Random) -> int:
    """Send reasoning that another server packed and that unpacks to a thousand times its size."""
    blocks = [{"type": "redacted_thinking", "data": _signed()}] * draw.choice((6, 60))
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": blocks}]
    return target.post("/v1/messages", {"messages": [*said, {"role": "user", "content": "y"}]})


def stopped_engine(target: Target, draw: random.Random) -> None:
    """No client's doing: the engine stands still for a while, and nothing is lost."""
    with _STOPPING:
        os.kill(target.engine, signal.SIGSTOP)
        try:
            time.sleep(draw.uniform(0, _STOP_S))
        finally:
            os.kill(target.engine, signal.SIGCONT)


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
    bomb,
    signed,
    stopped_engine,
    half_sent,
    unread,
    noise,
)
