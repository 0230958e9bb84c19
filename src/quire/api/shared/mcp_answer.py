"""A client's answer that joins the answers of several rounds: the part that protocols share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Send

from quire.api.shared.mcp_asked import JsonBody, MadeCall, Target

MakeCall = Callable[[Target, str], Awaitable[MadeCall]]
MOST_ROUNDS = 16
"""Rounds of calls in a row; what follows when they are used up is the protocol's to say."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with MCP tools.

    Attributes:
        fields: the request as the client sent it.
        shown: the request with functions in place of MCP servers.
        targets: its MCP tools, by the names of their functions.
    """

    fields: JsonBody
    shown: JsonBody
    targets: Mapping[str, Target]


class Answer(ABC):
    """Receives the answer to each round, makes its calls, and writes one answer to the client.

    Args:
        call: makes one call, unless the client leaves.
        client: the client's ASGI channel.
    """

    def __init__(self, asked: Asked, call: MakeCall, client: Send) -> None:
        self.fields = asked.fields
        self.targets = asked.targets
        self.make_call = call
        self.started = False
        self._client = client
        self._streams = False
        self._head: Message = {}
        self._body = bytearray()

    @abstractmethod
    def request(self, number: int) -> JsonBody:
        """Return the body of a round's request. Rounds are numbered from 0."""

    @abstractmethod
    async def event(self, data: Any, written: bytes) -> None:
        """Handle an event of a round's stream; `written` is the event as it came."""

    @abstractmethod
    async def whole(self, body: JsonBody) -> None:
        """Handle the answer to a round that is not streamed."""

    @abstractmethod
    async def again(self, number: int) -> bool:
        """Make the calls of the round that has ended. Return whether another round follows;
        otherwise the client's answer is complete.
        """

    @abstractmethod
    def error_event(self, body: JsonBody) -> bytes:
        """Return the event that ends a stream with an error of a later round."""

    async def open(self) -> None:  # noqa: B027 -- most protocols need none
        """Prepare the first round."""

    def close(self) -> None:  # noqa: B027 -- most protocols hold nothing
        """Release the resources of an answer that did not end."""

    async def take(self, message: Message) -> None:
        """Handle an ASGI message from the inner endpoint."""
        if message["type"] == "http.response.start":
            self._head, self._body = message, bytearray()
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._streams = message["status"] == 200 and kind.startswith(b"text/event-stream")
            if self._streams and not self.started:
                self.started = True
                await self._client(message)
            return
        self._body += message.get("body", b"")
        if self._streams:
            await self._take_events()
        elif not message.get("more_body"):
            await self._take_whole()

    async def _take_events(self) -> None:
        while (end := self._body.find(b"\n\n")) >= 0:
            written = bytes(self._body[: end + 2])
            del self._body[: end + 2]
            lines = written.split(b"\n")
            data = b"".join(line[6:] for line in lines if line.startswith(b"data: "))
            known = data and data != b"[DONE]"
            await self.event(json.loads(data) if known else None, written)

    async def _take_whole(self) -> None:
        if self._head["status"] == 200:
            await self.whole(json.loads(self._body))
        elif self.started:
            await self.write(self.error_event(json.loads(self._body)), more=False)
        else:
            await self.respond(bytes(self._body))

    @property
    def failed(self) -> bool:
        """Whether the round was refused. Its error has gone to the client."""
        return self._head.get("status") != 200

    @property
    def streams(self) -> bool:
        """Whether the round is streamed."""
        return self._streams

    async def respond(self, body: bytes) -> None:
        """Send an answer that is not streamed, under the round's head."""
        headers = [each for each in self._head["headers"] if each[0] != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        self.started = True
        await self._client({**self._head, "headers": headers})
        await self.write(body, more=False)

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send bytes of the answer's body."""
        await self._client({"type": "http.response.body", "body": body, "more_body": more})


def summed(one: JsonBody, other: JsonBody) -> JsonBody:
    """Return the sums of two usage objects, name by name."""
    result = dict(one)
    for name, value in other.items():
        if isinstance(value, dict):
            result[name] = summed(result.get(name) or {}, value)
        elif isinstance(value, int | float):
            result[name] = (result.get(name) or 0) + value
        else:
            result.setdefault(name, value)
    return result
