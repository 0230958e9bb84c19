"""Long answers: written as they come and sent in pieces, between which others run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from quire.api.app import build_app
from quire.api.shared.limits import Slots
from quire.api.shared.pieces import WRITE, Array, Merged, pieces
from quire.core.config import ServerConfig
from quire.serving.service import Service
from quire.serving.streams import BATCH_ENTRIES
from quire.text.tokenizer import Tokenizer
from tests.attack.test_slow_reader import Turns
from tests.serving.conftest import engine, service, tokenizer
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.server import one_model

__all__ = ["engine", "service", "tokenizer"]


def say(engine: ScriptedEngine, words: Sequence[int]) -> None:
    """Every request gets these tokens, in large steps."""
    engine.info = replace(engine.info, context_length=1 << 14)
    engine.reset(lambda _: Script(tuple(words), group=20))


TOP, TOKENS = 20, 1500
SAID = [{"role": "user", "content": "x"}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": SAID, "logprobs": True, "top_logprobs": TOP, "n": 2, "max_tokens": TOKENS},
    ),
    "completions": (
        "/v1/completions",
        {"prompt": "x", "logprobs": TOP, "n": 2, "max_tokens": TOKENS},
    ),
    "responses": (
        "/v1/responses",
        {"input": "x", "top_logprobs": TOP, "max_output_tokens": TOKENS},
    ),
}


class Sent:
    """A request to the application, and in which turns of the loop its answer was made."""

    def __init__(self, path: str, body: dict[str, Any], app: Any) -> None:
        self._app, self._body = app, json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        self._scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
        }
        self.status = 0
        self.bodies: list[tuple[int, bytes]] = []
        self.rendered: dict[int, int] = {}
        self.over = 0

    async def answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        turns, asked, plain = Turns(), iter([self._body]), Tokenizer.token_bytes

        def counted(tokenizer: Tokenizer, token_id: int) -> bytes:
            self.rendered[turns.count] = self.rendered.get(turns.count, 0) + 1
            return plain(tokenizer, token_id)

        async def receive() -> dict[str, Any]:
            for body in asked:
                return {"type": "http.request", "body": body}
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        async def send(message: Any) -> None:
            self.status = message.get("status", self.status)
            if message["type"] == "http.response.body":
                self.bodies.append((turns.count, message["body"]))

        monkeypatch.setattr(Tokenizer, "token_bytes", counted)
        await self._app(self._scope, receive, send)
        self.over = turns.count
        turns.stop()

    @property
    def text(self) -> str:
        return b"".join(body for _, body in self.bodies).decode()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", ASKED)
async def test_a_turn_renders_and_sends_little(
    service: Service,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    stream: bool,
) -> None:
    say(engine, service.tokenizer.encode("word " * TOKENS)[:TOKENS])
    path, body = ASKED[name]
    sent = Sent(
        path,
        body | {"stream": stream},
        build_app(one_model(engine, "demo", ServerConfig()), ServerConfig()),
    )
    await sent.answer(monkeypatch)
    assert sent.status == 200, sent.text
    # A batch may go over its bound by one output of each choice; chat asks twice for a token.
    assert max(sent.rendered.values()) <= 2 * (BATCH_ENTRIES + 2 * 20 * (TOP + 1))
    assert sum(sent.rendered.values()) >= TOKENS * (TOP + 1)
    assert max(len(body) for _, body in sent.bodies) <= 4 * WRITE
    long = [turn for turn, body in sent.bodies if len(body) >= WRITE]
    assert len(set(long)) == len(long), "writes within one turn"
    if stream:
        assert sent.over == sent.bodies[-1][0], "its slot is held after the last byte"


async def test_tokens_without_text_are_rendered_as_they_come(
    service: Service, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<|tool_call>call:f{a:<|"|>' + "word " * TOKENS + '<|"|>}<tool_call|>'
    say(engine, service.tokenizer.encode(call))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    path, body = ASKED["chat"]
    asked = body | {"tools": [tool], "n": 1, "max_tokens": 4000}
    sent = Sent(path, asked, build_app(one_model(engine, "demo", ServerConfig()), ServerConfig()))
    await sent.answer(monkeypatch)
    assert '"tool_calls"' in sent.text
    assert max(sent.rendered.values()) <= 2 * (BATCH_ENTRIES + 64 * (TOP + 1))
    assert sum(sent.rendered.values()) >= TOKENS * (TOP + 1)


async def test_what_whole_answers_hold_is_bounded(
    service: Service, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.api.shared.limits._HELD_BYTES", 1 << 18)
    say(engine, service.tokenizer.encode("word " * TOKENS)[:TOKENS])
    held: list[int] = []
    leave = Slots.leave

    def left(slots: Slots, scope: Any) -> None:
        held.append(slots.held)
        leave(slots, scope)
        held.append(slots.held)

    monkeypatch.setattr(Slots, "leave", left)
    path, body = ASKED["chat"]
    sent = Sent(path, body, build_app(one_model(engine, "demo", ServerConfig()), ServerConfig()))
    await sent.answer(monkeypatch)
    assert (sent.status, json.loads(sent.text)["error"]["code"]) == (429, "too_many_logprobs")
    assert 0 < held[0] <= 1 << 18
    assert held[1] == 0
    assert all(ticket.aborted for ticket in engine.tickets)


def test_pieces_spell_what_json_does() -> None:
    def items() -> Iterator[Any]:
        yield {"a": Array([])}
        yield b'{"b":1},{"c":"\\u00e9"}'
        yield [Array([b"1", 2])]

    value = {"x": Array(items()), "y": Merged(b'{"z":0}', {"w": Array(["é"]), "v": None})}
    expected = {"x": [{"a": []}, {"b": 1}, {"c": "é"}, [[1, 2]]], "y": {"z": 0, "w": ["é"]}}
    expected["y"] |= {"v": None}  # type: ignore[operator]
    assert json.loads(b"".join(pieces(value))) == expected
    with pytest.raises(TypeError):
        b"".join(pieces({"x": object()}))
