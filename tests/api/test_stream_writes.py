"""A streamed token costs the HTTP side one wake-up, one batch of events and one write."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable

import pytest
from starlette.applications import Starlette
from starlette.types import Message, Send

from quire.api.app import build_app
from quire.api.shared.sse import EventStream
from quire.core.config import ServerConfig
from quire.core.info import ModelInfo
from quire.core.request import Output
from quire.demo import MODEL_DIR
from quire.serving.ticket import Ticket
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, Serve
from tests.api.test_foreign_fields import BODIES
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.server import one_model

TOKENS = 12


@pytest.mark.parametrize("path", BODIES)
def test_a_token_is_one_waking_and_one_write(
    serve: Serve, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    send_body = EventStream._send_body

    async def counted(self: EventStream, send: Send, body: bytes, **more: bool) -> None:
        written.append(body)
        await send_body(self, send, body, **more)

    woken: list[Ticket] = []
    arrival = Ticket.arrival

    def noted(ticket: Ticket) -> asyncio.Future[None] | None:
        woken.append(ticket)
        return arrival(ticket)

    monkeypatch.setattr(EventStream, "_send_body", counted)
    monkeypatch.setattr(Ticket, "arrival", noted)
    served = serve()
    tokens = served.ids("fox ")[:1] * TOKENS
    served.engine.script = lambda _: Script(tokens, delay_s=0.01)
    body = {**BODIES[path], "stream": True, "max_tokens": TOKENS}
    if path == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    with HTTP.stream("POST", f"{served.url}/v1/{path}", json=body) as answer:
        assert answer.status_code == 200
        assert answer.read()
    served.settle()
    assert 2 <= len(written) <= TOKENS + 2  # a head and an end
    assert 2 <= len(woken) <= TOKENS + 2  # accepted, and the end


async def answer(app: Starlette, tokens: int, sent: Callable[[], None] = lambda: None) -> None:
    """Stream an answer without sockets.

    Args:
        sent: called at each write.
    """
    body = {**BODIES["chat/completions"], "stream": True, "max_tokens": tokens}
    arrived = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Message:
        if not arrived:
            await asyncio.Event().wait()
        return arrived.pop()

    async def send(message: Message) -> None:
        assert message.get("status", 200) == 200
        sent()

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    await app(scope | {"query_string": b"", "root_path": ""}, receive, send)


async def calls_of(app: Starlette, tokens: int) -> Counter[str]:
    """Return how often Python functions ran for a streamed answer, by the file they are in."""
    files: Counter[str] = Counter()
    sys.setprofile(
        lambda frame, event, _: files.update([frame.f_code.co_filename] * (event == "call"))
    )
    try:
        await answer(app, tokens)
    finally:
        sys.setprofile(None)
    return files


def test_a_request_and_a_token_call_few_functions_and_resume_no_middleware(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "quire.access")  # its handlers are not what is counted
    info = ModelInfo(str(MODEL_DIR), "gemma4", 4096, 4096, "float32", "cpu", 1 << 20)
    fox = tuple(tokenizer.encode("fox "))[:1]
    engine = ScriptedEngine(info, lambda request: Script(fox * request.max_tokens))

    async def counted() -> tuple[Counter[str], Counter[str]]:
        app = build_app(one_model(engine, "m", ServerConfig()), ServerConfig())
        async with app.router.lifespan_context(app):
            await calls_of(app, 2)
            return await calls_of(app, 8), await calls_of(app, 40)

    few, many = asyncio.run(counted())
    own = {file: (many[file] - few[file]) / 32 for file in many if "/tests/" not in file}
    around = [own[file] for file in own if file.endswith("starlette/routing.py")]
    assert around == [0]
    token = sum(calls for file, calls in own.items() if "asyncio" not in file)
    assert token <= 43
    request = sum(few[file] for file in few if "asyncio" not in file and "/tests/" not in file)
    assert request - 8 * token <= 705


def test_an_answer_ends_two_turns_of_the_loop_after_its_last_token(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = ModelInfo(str(MODEL_DIR), "gemma4", 4096, 4096, "float32", "cpu", 1 << 20)
    fox = tuple(tokenizer.encode("fox "))[:1]
    engine = ScriptedEngine(info, lambda request: Script(fox * request.max_tokens, delay_s=0.01))
    turns = last_token = last_write = 0
    run_once, put = asyncio.SelectorEventLoop._run_once, Ticket.put

    def counted(loop: asyncio.SelectorEventLoop) -> None:
        nonlocal turns
        turns += 1
        run_once(loop)

    def noted(ticket: Ticket, output: Output) -> None:
        nonlocal last_token
        last_token = turns
        put(ticket, output)

    def written() -> None:
        nonlocal last_write
        last_write = turns

    monkeypatch.setattr(asyncio.SelectorEventLoop, "_run_once", counted)
    monkeypatch.setattr(Ticket, "put", noted)

    async def stream() -> None:
        app = build_app(one_model(engine, "m", ServerConfig()), ServerConfig())
        async with app.router.lifespan_context(app):
            await answer(app, 4, written)

    asyncio.run(stream())
    assert 0 < last_write - last_token <= 2
