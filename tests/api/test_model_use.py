"""Events in a client's stream while its model is loaded, under a virtual clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.types import Message

from quire.api.app import build_app
from quire.api.shared.sse import KEEPALIVE_S
from quire.core.config import EngineConfig, ModelConfig, ServerConfig
from quire.core.errors import ModelError
from quire.core.info import ModelInfo
from quire.demo import MODEL_DIR
from quire.serving.assembly import assemble
from quire.serving.engine_client import MakeRoom
from quire.serving.model import Loaded
from quire.serving.models import Models, OnProgress
from quire.text.tokenizer import Tokenizer
from tests.support import virtual_time
from tests.support.scripted_engine import Script, ScriptedEngine

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
    RESPONSES: {"input": "Hi"},
}


def application(load_s: float, problem: str | None = None) -> Starlette:
    """Return a server of two models, each of which takes a while to load."""
    info = ModelInfo(str(MODEL_DIR), "gemma4", 4096, 4096, "float32", "cpu", 1 << 20)
    words = tuple(Tokenizer.open(MODEL_DIR).encode("the"))

    async def opener(
        model_config: ModelConfig, on_progress: OnProgress, make_room: MakeRoom
    ) -> Loaded:
        await asyncio.sleep(load_s)
        if problem is not None:
            raise ModelError(problem)
        engine = ScriptedEngine(info, lambda _: Script(words))
        return Loaded(assemble(engine, model_config.name, model_config.serving))

    model_configs = [
        ModelConfig(EngineConfig(""), ServerConfig(served_name=name)) for name in ("a", "b")
    ]
    return build_app(Models(model_configs, opener), ServerConfig())


async def asked(
    app: Starlette, path: str, body: dict[str, Any]
) -> tuple[list[tuple[float, Message]], bytes]:
    """Return the time of each piece that is sent for a request, and the whole body."""
    sent: list[tuple[float, Message]] = []
    incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        await asyncio.sleep(100_000)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append((asyncio.get_running_loop().time(), message))

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    scope |= {"query_string": b"", "client": None, "raw_path": path.encode(), "root_path": ""}
    await app(scope, receive, send)
    return sent, b"".join(message.get("body", b"") for _, message in sent)


def starts(sent: list[tuple[float, Message]]) -> list[int]:
    return [each["status"] for _, each in sent if each["type"] == "http.response.start"]


def gaps(sent: list[tuple[float, Message]]) -> float:
    times = [0.0, *(time for time, _ in sent)]
    return max(after - before for before, after in pairwise(times))


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_stream_hears_that_its_model_is_loaded(path: str) -> None:
    body = {**ASK[path], "model": "b", "stream": True}
    sent, whole = virtual_time.run(asked(application(100.0), path, body))
    assert starts(sent) == [200]
    assert gaps(sent) <= KEEPALIVE_S + 1e-6
    assert whole.count(b": waiting") == 6
    assert b"the" in whole
    assert sent[-1][1].get("more_body") is False


def test_a_model_that_is_soon_there_changes_nothing() -> None:
    body = {**ASK[CHAT], "model": "b", "stream": True}
    sent, whole = virtual_time.run(asked(application(10.0), CHAT, body))
    assert b"waiting" not in whole
    names = {name for _, each in sent[:1] for name, _ in each["headers"]}
    assert b"x-quire-cached-tokens" in names


def test_an_answer_that_is_not_streamed_keeps_its_status() -> None:
    body = {**ASK[CHAT], "model": "b"}
    sent, whole = virtual_time.run(asked(application(100.0), CHAT, body))
    assert (starts(sent), json.loads(whole)["model"]) == ([200], "b")
    sent, whole = virtual_time.run(asked(application(100.0, "no weights"), CHAT, body))
    assert starts(sent) == [503]
    assert "no weights" in json.loads(whole)["error"]["message"]


def openai_error(event: dict[str, Any]) -> str:
    return str(event["error"]["message"])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (CHAT, openai_error),
        (MESSAGES, openai_error),
        (RESPONSES, lambda event: event["message"]),
    ],
)
def test_a_stream_that_was_started_ends_with_the_error(
    path: str, message: Callable[[dict[str, Any]], str]
) -> None:
    body = {**ASK[path], "model": "b", "stream": True}
    sent, whole = virtual_time.run(asked(application(20.0, "no weights"), path, body))
    assert starts(sent) == [200]
    last = whole.decode().rstrip().rsplit("\n", 1)[-1]
    assert "no weights" in message(json.loads(last.removeprefix("data: ")))
    assert sent[-1][1].get("more_body") in (None, False)


def test_an_unknown_model_is_refused_before_any_is_loaded() -> None:
    body = {**ASK[CHAT], "model": "c", "stream": True}
    sent, whole = virtual_time.run(asked(application(100.0), CHAT, body))
    assert (starts(sent), sent[0][0]) == ([404], 0.0)
    assert json.loads(whole)["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("keep_alive", ["5 minutes", "m", "1h30", True, [1]])
def test_a_time_to_keep_a_model_is_a_number_or_a_duration(keep_alive: object) -> None:
    body = {**ASK[CHAT], "keep_alive": keep_alive}
    sent, whole = virtual_time.run(asked(application(1.0), CHAT, body))
    assert (starts(sent), json.loads(whole)["error"]["param"]) == ([400], "keep_alive")


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [(30, 30.0), (0, 0.0), ("0", 0.0), ("10m", 600.0), ("1h1m1.5s", 3661.5), (-1, None)],
)
def test_a_request_says_how_long_its_model_stays(keep_alive: object, seconds: float | None) -> None:
    async def states() -> list[dict[str, Any]]:
        app = application(1.0)
        seen = []
        body = {**ASK[CHAT], "keep_alive": keep_alive}
        assert starts((await asked(app, CHAT, body))[0]) == [200]
        for wait in (0.0, (seconds or 0.0) + 1.0):
            await asyncio.sleep(wait)
            seen.append(await listed(app))
        return seen

    first, later = virtual_time.run(states())
    if seconds is None:
        assert (first["state"], first["expires_s"], later["state"]) == ("loaded", None, "loaded")
    else:
        assert first["expires_s"] == pytest.approx(seconds) or seconds == 0
        assert later["state"] == "unloaded"


async def listed(app: Starlette) -> dict[str, Any]:
    """Return the first model as `/v1/models` lists it."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b""}
    scope |= {"headers": [(b"host", b"localhost")], "client": None, "root_path": ""}
    await app(scope, receive, send)
    first: dict[str, Any] = json.loads(sent[1]["body"])["data"][0]
    return first


def test_a_client_whose_models_loading_was_stopped_does_not_load_it_again() -> None:
    async def check() -> tuple[list[tuple[float, Message]], bytes]:
        app = application(1e9)
        asking = asyncio.create_task(asked(app, CHAT, {**ASK[CHAT], "model": "b"}))
        await asyncio.sleep(5)
        unloaded, _ = await asked(app, "/models/unload", {"model": "b"})
        assert starts(unloaded) == [200]
        return await asking

    sent, whole = virtual_time.run(check())
    assert starts(sent) == [503]
    assert (b"x-should-retry", b"false") in sent[0][1]["headers"]
    assert json.loads(whole)["error"]["code"] == "loading_stopped"
