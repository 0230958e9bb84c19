"""`--mcp`: chat requests with MCP tools, answered in rounds of calls.

A middleware of chat completions. Each round is a request of its own to the endpoint behind it, so
no model is held while a tool runs. The client sees one answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.mcp.asked import TYPE, AskedTools, MadeCall, asked_tools
from quire.api.shared.context import until_gone
from quire.api.shared.json_text import parse_json
from quire.api.shared.limits import Slots, check_headers, read_body
from quire.api.shared.pieces import compact
from quire.core.errors import RequestError
from quire.serving.mcp import McpServers

PATH = "/v1/chat/completions"
_MOST_ROUNDS = 16
_OWN_HEADERS = (b"content-length", b"content-encoding")


class RunsTools:
    """Route middleware that makes the MCP calls which a chat request allows beforehand."""

    def __init__(self, app: ASGIApp, servers: McpServers, slots: Slots, max_body: int) -> None:
        self._app = app
        self._servers = servers
        self._slots = slots
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        check_headers(request)
        with self._slots.bodies.reading() as counted:
            body = await read_body(request, self._max_body, counted)
        fields = _fields(body)
        asked = fields and await asked_tools(fields["tools"], self._servers)
        if not fields or not asked:
            await self._round(scope, body, receive=receive, send=send)
            return
        if fields.get("n") not in (None, 1):
            raise RequestError("'n' is 1 where tools are MCP servers.", param="n")
        answer = _Answer(send)
        try:
            await self._rounds(scope, receive, {**fields, "tools": asked.tools}, asked, answer)
        except ClientDisconnect:
            if not answer.started:
                raise

    async def _rounds(
        self,
        scope: Scope,
        receive: Receive,
        fields: dict[str, Any],
        asked: AskedTools,
        answer: _Answer,
    ) -> None:
        for number in range(_MOST_ROUNDS + 1):
            said = _Round(answer)
            await self._round(scope, compact(fields), receive=receive, send=said.send)
            if number == _MOST_ROUNDS or not said.calls_all(asked):
                await said.finish()
                return
            made = [
                await until_gone(receive, asked.call(self._servers, each)) for each in said.calls
            ]
            await answer.called(made)
            answer.spent(said.usage)
            fields = {
                **fields,
                "tool_choice": "auto",  # what had to be called has been called
                "messages": [*fields["messages"], *said.messages(made)],
            }

    async def _round(self, scope: Scope, body: bytes, *, receive: Receive, send: Send) -> None:
        headers = [each for each in scope["headers"] if each[0] not in _OWN_HEADERS]
        scope["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
        await self._app(scope, _replayed(body, receive), send)


def _fields(body: bytes) -> dict[str, Any] | None:
    """Return a request's fields if it may name an MCP server. All other requests go to the endpoint
    as they are.
    """
    if f'"{TYPE}"'.encode() not in body:
        return None
    fields = parse_json(body)
    if not isinstance(fields, dict) or not isinstance(fields.get("tools"), list):
        return None
    return fields if isinstance(fields.get("messages"), list) else None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI receive channel that yields a body, and then the client's own messages."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


class _Answer:
    """The client's answer, merged from all rounds: one head, one id, all calls, summed usage."""

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send
        self._identity: dict[str, Any] = {}
        self._calls: list[MadeCall] = []
        self._usage: dict[str, Any] = {}
        self._streams = False

    async def start(self, head: Message) -> None:
        if not self.started:
            self.started = self._streams = True
            await self._send(head)

    async def write(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def chunk(self, chunk: Mapping[str, Any]) -> None:
        """Send a chunk of a stream, with the id of the first round."""
        if not self._identity:
            self._identity = {name: chunk.get(name) for name in ("id", "created", "model")}
        await self.write(b"data: " + compact({**chunk, **self._identity}) + b"\n\n")

    async def called(self, made: list[MadeCall]) -> None:
        """Send the calls that were made to the client."""
        self._calls += made
        if self._streams:
            delta = {"mcp_calls": [each.body() for each in made]}
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            await self.chunk({"object": "chat.completion.chunk", "choices": [choice]})

    def spent(self, usage: Mapping[str, Any]) -> None:
        self._usage = _summed(self._usage, usage)

    def total(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return _summed(self._usage, usage)

    async def whole(self, head: Message, body: bytes) -> None:
        """Send an answer that is not streamed. Errors pass unchanged."""
        if head["status"] == 200:
            fields = json.loads(body)
            fields["choices"][0]["message"]["mcp_calls"] = [each.body() for each in self._calls]
            fields["usage"] = self.total(fields["usage"])
            body = compact(fields)
        headers = [each for each in head["headers"] if each[0] != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**head, "headers": headers})
        await self.write(body, more=False)


class _Round:
    """One round's answer. Text is passed on as it comes; calls are held until it is known who makes
    them.
    """

    def __init__(self, answer: _Answer) -> None:
        self.calls: list[dict[str, Any]] = []
        self.usage: dict[str, Any] = {}
        self._answer = answer
        self._head: Message = {}
        self._body = bytearray()
        self._streams = False
        self._said: dict[str, Any] = {"role": "assistant", "content": ""}
        self._finish = ""
        self._held: list[dict[str, Any]] = []

    async def send(self, message: Message) -> None:
        """Handle an ASGI message of the endpoint."""
        if message["type"] == "http.response.start":
            self._head = message
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._streams = message["status"] == 200 and kind.startswith(b"text/event-stream")
            if self._streams:
                await self._answer.start(message)
            return
        self._body += message.get("body", b"")
        while self._streams and (end := self._body.find(b"\n\n")) >= 0:
            event = bytes(self._body[: end + 2])
            del self._body[: end + 2]
            await self._take(event)
        if not self._streams and not message.get("more_body"):
            self._read()

    async def _take(self, event: bytes) -> None:
        if event == b"data: [DONE]\n\n":
            return
        chunk = json.loads(event[6:]) if event.startswith(b"data: ") else None
        if chunk is None or "error" in chunk:
            await self._answer.write(event)
            return
        if not chunk["choices"]:
            self.usage = chunk["usage"]
            self._held.append(chunk)
            return
        choice = chunk["choices"][0]
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            self._said[name] = self._said.get(name, "") + (delta.get(name) or "")
        for part in delta.get("tool_calls", ()):
            self._add(part)
        self._finish = choice.get("finish_reason") or self._finish
        if delta.get("tool_calls") or self._finish:
            self._held.append(chunk)
        else:
            await self._answer.chunk(chunk)

    def _add(self, part: dict[str, Any]) -> None:
        if part["index"] == len(self.calls):
            self.calls.append({"id": "", "type": "function", "function": {}})
        call = self.calls[part["index"]]
        call["id"] = part.get("id") or call["id"]
        for name, text in part.get("function", {}).items():
            call["function"][name] = call["function"].get(name, "") + text

    def _read(self) -> None:
        """Parse an answer that is not streamed."""
        if self._head["status"] != 200:
            return
        fields = json.loads(self._body)
        choice = fields["choices"][0]
        self.usage = fields["usage"]
        self._finish, self._said = choice["finish_reason"], choice["message"]
        self.calls = self._said.get("tool_calls") or []

    def calls_all(self, asked: AskedTools) -> bool:
        """Return whether the round ended with calls, and this server makes all of them."""
        named = all("name" in each["function"] for each in self.calls)
        return self._finish == "tool_calls" and named and asked.approved(self.calls)

    def messages(self, made: list[MadeCall]) -> list[dict[str, Any]]:
        """Return the messages that the next round adds to this one's."""
        said = {name: self._said[name] for name in ("role", "content") if self._said.get(name)}
        if reasoning := self._said.get("reasoning_content"):
            said["reasoning_content"] = reasoning
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": each.output}
            for call, each in zip(self.calls, made, strict=True)
        ]
        return [{**said, "tool_calls": self.calls}, *results]

    async def finish(self) -> None:
        """Send what was held back, because this round is the last one."""
        if not self._streams:
            await self._answer.whole(self._head, bytes(self._body))
            return
        for chunk in self._held:
            if not chunk["choices"]:
                chunk = {**chunk, "usage": self._answer.total(chunk["usage"])}
            await self._answer.chunk(chunk)
        await self._answer.write(b"data: [DONE]\n\n", more=False)


def _summed(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums of two usage objects, name by name."""
    result = dict(one)
    for name, value in other.items():
        if isinstance(value, Mapping):
            result[name] = _summed(result.get(name) or {}, value)
        elif isinstance(value, int | float):
            result[name] = (result.get(name) or 0) + value
        else:
            result.setdefault(name, value)
    return result
