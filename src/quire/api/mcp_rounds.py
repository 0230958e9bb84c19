"""`--mcp`: requests with MCP tools, answered in rounds of calls.

A middleware of chat completions, responses and messages. Each round is a request of its own to the
endpoint behind it, so no model is held while a tool runs. The client sees one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.chat import mcp_rounds as chat
from quire.api.messages import mcp_rounds as messages
from quire.api.responses import mcp_rounds as responses
from quire.api.responses.store import CallerStores
from quire.api.shared.context import until_gone
from quire.api.shared.json_text import parse_json
from quire.api.shared.limits import Slots, check_headers, read_body
from quire.api.shared.mcp_answer import Answer, Asked, MakeCall
from quire.api.shared.mcp_asked import AskedServer, MadeCall, Target, made, resolved
from quire.api.shared.pieces import compact
from quire.serving.mcp import McpServers

_OWN_HEADERS = (b"content-length", b"content-encoding")


@dataclass(frozen=True, slots=True)
class _Protocol:
    """The functions by which a protocol's requests are answered in rounds.

    Attributes:
        asked: returns the MCP servers of a request.
        shown: returns the request with functions in place of MCP servers.
        answer: makes the answer; None if the endpoint only counts tokens.
    """

    asked: Callable[[dict[str, Any]], Sequence[AskedServer]]
    shown: Callable[[dict[str, Any], Mapping[str, Target]], dict[str, Any]]
    answer: Callable[[Request, Asked, MakeCall, Send], Answer] | None = None


def _protocols(stores: CallerStores) -> Mapping[str, _Protocol]:
    """Return the protocols by the paths of their endpoints."""
    return {
        "/v1/chat/completions": _Protocol(
            chat.asked, chat.shown, lambda _, *given: chat.ChatAnswer(*given)
        ),
        "/v1/messages": _Protocol(
            messages.asked, messages.shown, lambda _, *given: messages.MessagesAnswer(*given)
        ),
        "/v1/messages/count_tokens": _Protocol(messages.asked, messages.shown),
        "/v1/responses": _Protocol(
            responses.asked,
            responses.shown,
            lambda request, asked, call, client: responses.ResponsesAnswer(
                asked, call, client, store=stores.of(request)
            ),
        ),
        "/v1/responses/input_tokens": _Protocol(responses.asked, responses.shown),
    }


class RunsTools:
    """Route middleware that makes the MCP calls which a request allows."""

    def __init__(
        self,
        app: ASGIApp,
        servers: McpServers,
        slots: Slots,
        max_body: int,
        stores: CallerStores,
    ) -> None:
        self._app = app
        self._servers = servers
        self._slots = slots
        self._max_body = max_body
        self._protocols = _protocols(stores)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        protocol = self._protocols.get(scope["path"])
        if protocol is None:
            await self._app(scope, receive, send)
            return
        check_headers(request)
        with self._slots.bodies.reading() as counted:
            body = await read_body(request, self._max_body, counted)
        fields = parse_json(body) if b"mcp" in body else None
        asked = protocol.asked(fields) if isinstance(fields, dict) else ()
        if not asked:
            await self._round(scope, body, receive=receive, send=send)
            return
        assert isinstance(fields, dict)
        targets = await until_gone(receive, resolved(asked, self._servers))
        shown = protocol.shown(fields, targets)
        if protocol.answer is None:
            await self._round(scope, compact(shown), receive=receive, send=send)
            return

        async def call(target: Target, arguments: str) -> MadeCall:
            return await until_gone(receive, made(self._servers, target, arguments))

        answer = protocol.answer(request, Asked(fields, shown, targets), call, send)
        try:
            await self._rounds(scope, receive, answer)
        except ClientDisconnect:
            if not answer.started:
                raise
        finally:
            answer.close()

    async def _rounds(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        await answer.open()
        number = 0
        while True:
            body = compact(answer.request(number))
            await self._round(scope, body, receive=receive, send=answer.take)
            if answer.failed or not await answer.again(number):
                return
            number += 1

    async def _round(self, scope: Scope, body: bytes, *, receive: Receive, send: Send) -> None:
        headers = [each for each in scope["headers"] if each[0] not in _OWN_HEADERS]
        scope["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
        await self._app(scope, _replayed(body, receive), send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI receive channel that yields a body, and then the client's own messages."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
